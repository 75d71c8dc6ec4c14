"""The trackio sink: one trackio run for each attempt, grouped by the run's name, in trackio's local database."""

import trackio

from nmoe.runs.sinks.sinks import Attempt, ClientSink


class TrackioSink(ClientSink):
    """Logs to a new trackio run in the group `attempt.name`, which `trackio show` displays. After a resumption the new run begins
    with all earlier steps. The variable TRACKIO_DIR sets the database's directory."""

    def __init__(self, attempt: Attempt) -> None:
        run = trackio.init(
            project=attempt.project,
            group=attempt.name,
            name=f"{attempt.name}-{attempt.number}",
            config=dict(attempt.config),
            embed=False,
            auto_log_cpu=False,  # only what the ledger has
            auto_log_gpu=False,
        )
        super().__init__(run, attempt)
