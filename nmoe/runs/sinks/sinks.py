"""The sinks of a run: opened at its start, each fed by its own thread, and asked at the end for lost records."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from nmoe.config.tables.run import SinksSection
from nmoe.errors import UserError
from nmoe.extras import how_to_install


@dataclass(frozen=True)
class Attempt:
    """One start of a run, the first or a resumption, with the data that sinks need.

    directory: the directory of the run.
    name: run.name.
    number: 1 for the first start, and one more each time that the run is resumed.
    config: the tables of config.toml.
    project: the setting of `[sinks]`.
    wandb_mode: the setting of `[sinks]`.
    rows: the metrics of the steps before this start, from metrics.jsonl. A sink writes them first, so that it has the
        whole run, even if an earlier attempt did not finish its records.
    alerts: the alerts before this start, from alerts.jsonl.
    """

    directory: Path
    name: str
    number: int
    config: Mapping[str, Any]
    project: str
    wandb_mode: str
    rows: Sequence[Mapping[str, Any]] = ()
    alerts: Sequence[Mapping[str, Any]] = ()


class Sink(Protocol):
    """Receives the metrics of a run, in the order of its steps, on its own thread. Any method may raise; the failure is counted."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the numbers of one step."""

    def alert(self, step: int, message: str) -> None:
        """Writes an alert of the run."""

    def close(self) -> None:
        """Writes the remaining records, and closes files and connections."""


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row of metrics.jsonl, without `step`, text and lists; integers stay integers."""
    return {
        name: value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


# Module and class by name; the package that one needs, and the extra with it, has the sink's name. CSV needs none.
_SINKS = {
    "csv": ("nmoe.runs.sinks.csv_file", "CsvSink"),
    "tensorboard": ("nmoe.runs.sinks.tensorboard", "TensorBoardSink"),
    "wandb": ("nmoe.runs.sinks.wandb", "WandbSink"),
    "trackio": ("nmoe.runs.sinks.trackio", "TrackioSink"),
}
# How long the end of a run waits for its sinks, all of them together: an upload takes a while.
CLOSE_SECONDS = 60.0


# With these trackio does not keep to its local database: a Space, a server, and a hook for alerts.
_TRACKIO_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")


def refuse_unready(section: SinksSection) -> None:
    """Raises UserError, with the remedy, for a sink whose package is missing, or that would send metrics off this machine without
    permission in the configuration."""
    refuse_without_packages(section.to)
    named = trackio_remotes(section)
    if named and not section.trackio_remote:
        raise UserError(
            f"[sinks] to: trackio would send metrics off this machine, as {', '.join(named)} in the environment asks; unset it, or "
            "agree by sinks.trackio_remote = true"
        )


def trackio_remotes(section: SinksSection) -> list[str]:
    """Returns the environment variables that are set and make trackio, if it is a sink, send metrics or alerts off this machine."""
    return [name for name in _TRACKIO_REMOTE if os.environ.get(name)] if "trackio" in section.to else []


def refuse_without_packages(names: Collection[str]) -> None:
    """Raises UserError, with the command that installs them, if packages that the sinks need are not installed."""
    missing = [name for name in names if name != "csv" and not _is_installed(name)]
    if missing:
        raise UserError(
            f"[sinks] to: {', '.join(missing)}: not installed; run: {how_to_install(*missing)}, or leave it out"
        )


class ClientSink:
    """The common part of sinks whose package has the interface of W&B's client. A new run begins with all earlier steps."""

    def __init__(self, run: Any, attempt: Attempt) -> None:
        self._run = run
        for row in attempt.rows:
            self.write(row["step"], scalars_of(row))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def alert(self, step: int, message: str) -> None:
        self._run.alert(title=f"step {step}", text=message)

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """The sinks of one attempt. Only `close` waits for them, and no method raises because of them."""

    def __init__(self, names: Collection[str], attempt: Attempt) -> None:
        self._feeds = [Feed(name, _connector(name, attempt)) for name in names]

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Passes the numbers of a step to all sinks."""
        scalars = scalars_of(metrics)
        for feed in self._feeds:
            feed.offer(lambda sink: sink.write(step, scalars))

    def alert(self, step: int, message: str) -> None:
        """Passes an alert to all sinks."""
        for feed in self._feeds:
            feed.offer(lambda sink: sink.alert(step, message))

    def close(self) -> list[str]:
        """Waits until all is written, at most `CLOSE_SECONDS`. Returns one line for each sink that lost something."""
        for feed in self._feeds:
            feed.close()
        end = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.join(max(0.0, end - time.monotonic()))
        return [trouble for feed in self._feeds if (trouble := feed.trouble()) is not None]


def _is_installed(package: str) -> bool:
    """Returns whether a package can be imported; a mere folder of that name, such as the one that W&B makes, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _connector(name: str, attempt: Attempt) -> Callable[[], Sink]:
    """Returns a function that imports the sink's module, and with it the package, and opens the sink."""
    module, kind = _SINKS[name]
    return lambda: getattr(import_module(module), kind)(attempt)


# Records that may wait. A step is one.
QUEUE_LIMIT = 1000


class Feed:
    """Passes records to one sink from a separate thread, so that a slow or failing sink does not delay the run.

    A record is dropped if the queue is full, and lost if the sink raises; both are counted. `name` is the name of the
    sink. `connect` opens it, on the thread, since that may take seconds; if it raises, nothing is written.
    """

    def __init__(self, name: str, connect: Callable[[], Sink], limit: int = QUEUE_LIMIT) -> None:
        self.name = name
        self._connect, self._limit = connect, limit
        self._waiting: deque[Callable[[Sink], None]] = deque()
        self._change = threading.Condition()
        self._closing = False
        self._offered = self._written = 0
        self._reasons: list[str] = []
        # A daemon: a sink that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def offer(self, record: Callable[[Sink], None]) -> None:
        """Queues a record, a call of the sink, and returns at once; drops it if the queue is full."""
        with self._change:
            self._offered += 1
            if not self._thread.is_alive():
                return  # it is down, which is said already
            if len(self._waiting) < self._limit:
                self._waiting.append(record)
                self._change.notify()
            else:
                self._fail("its queue was full")

    def close(self) -> None:
        """Makes the thread write the queued records and end; `join` waits for it."""
        with self._change:
            self._closing = True
            self._change.notify()

    def join(self, seconds: float) -> None:
        """Waits until the thread has ended, at most `seconds`."""
        self._thread.join(seconds)

    def trouble(self) -> str | None:
        """Returns one line: how many records were not written, and the first and the last reason. None if nothing went wrong; a
        failure to close the sink gives a line although all records were written."""
        with self._change:
            reasons = [*self._reasons, *(["it did not end in time"] if self._thread.is_alive() else [])]
            if not reasons:
                return None
            lost = self._offered - self._written
            shown = "; ".join(dict.fromkeys((reasons[0], reasons[-1])))
            return f"sink {self.name}: {lost} of {self._offered} records were not written: {shown}"

    def _serve(self) -> None:
        try:
            sink = self._connect()
        except BaseException as error:  # any error of a sink's package, SystemExit too: the run goes on
            self._fail(f"could not be opened: {_shown(error)}")
            return
        while (record := self._next()) is not None:
            try:
                record(sink)
                self._written += 1
            except Exception as error:
                self._fail(_shown(error))
        try:
            sink.close()
        except Exception as error:
            self._fail(f"could not be closed: {_shown(error)}")

    def _next(self) -> Callable[[Sink], None] | None:
        """Waits for the next record and returns it; None if the run is over."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None

    def _fail(self, reason: str) -> None:
        if len(self._reasons) < 2:
            self._reasons.append(reason)
        else:
            self._reasons[1] = reason


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
