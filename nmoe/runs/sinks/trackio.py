"""The trackio sink: one trackio run for each attempt, grouped by the run's name, in trackio's local database."""

from collections.abc import Mapping

import trackio

from nmoe.runs.sinks.sinks import Attempt, scalars_of


class TrackioSink:
    """Logs to a new trackio run in the group `attempt.name`, which `trackio show` displays. After a resumption the new run begins
    with all earlier steps. The variable TRACKIO_DIR sets the database's directory."""

    def __init__(self, attempt: Attempt) -> None:
        self._run = trackio.init(
            project=attempt.project,
            group=attempt.name,
            name=f"{attempt.name}-{attempt.number}",
            config=dict(attempt.config),
            embed=False,
            auto_log_cpu=False,  # only what the ledger has
            auto_log_gpu=False,
        )
        for row in attempt.rows:
            self.write(row["step"], scalars_of(row))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def alert(self, step: int, message: str) -> None:
        self._run.alert(title=f"step {step}", text=message)

    def close(self) -> None:
        self._run.finish()
