"""The TensorBoard sink: one event file in the run's `tensorboard/`, with one Summary for each step."""

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from nmoe.runs.sinks.sinks import Attempt, scalars_of


class TensorBoardSink:
    """Writes the numbers of each step, which TensorBoard keeps as float32, and alerts as text under the tag `alerts`.

    A resumed run's file begins with all earlier steps, and replaces the files of earlier attempts: those may lack the last steps,
    or hold steps that were cut. The START event makes a running TensorBoard drop its copy of them.
    """

    def __init__(self, attempt: Attempt) -> None:
        directory = attempt.directory / "tensorboard"
        directory.mkdir(exist_ok=True)
        for earlier in directory.glob("events.out.tfevents.*"):
            earlier.unlink()
        # Readers take the files of a directory in the order of their names. Usually the writing host's name stands here.
        path = directory / f"events.out.tfevents.{int(time.time()):010d}.{attempt.number:06d}"
        # Unbuffered, so that written events survive a kill.
        self._writer = RecordWriter(path.open("wb", buffering=0))
        self._event(file_version="brain.Event:2")
        self._event(session_log=SessionLog(status=SessionLog.START))
        for row in attempt.rows:
            self.write(row["step"], scalars_of(row))
        for alert in attempt.alerts:
            self.alert(alert["step"], alert["message"])

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        # In one Summary: a call of add_scalar for each number takes 20 times as long.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._event(step=step, summary=Summary(value=values))

    def alert(self, step: int, message: str) -> None:
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        text = TensorProto(dtype=DT_STRING, string_val=[message.encode(errors="backslashreplace")])
        value = Summary.Value(tag="alerts", metadata=metadata, tensor=text)
        self._event(step=step, summary=Summary(value=[value]))

    def close(self) -> None:
        self._writer.close()

    def _event(self, **content: object) -> None:
        self._writer.write(Event(wall_time=time.time(), **content).SerializeToString())
