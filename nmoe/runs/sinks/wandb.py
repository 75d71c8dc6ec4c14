"""The Weights & Biases sink: one W&B run for each attempt, grouped by the run's name."""

import os

import wandb

from nmoe.runs.sinks.sinks import Attempt, ClientSink


class WandbSink(ClientSink):
    """Logs to a new W&B run in the group `attempt.name`, online or into the run's `wandb/` for `wandb sync`.

    W&B ignores steps at or below its last one, so that a resumed run, which repeats steps, cannot continue its earlier W&B run
    (wandb issues 3890 and 6216). The new one begins with all earlier steps.
    """

    def __init__(self, attempt: Attempt) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Only what the ledger has: no figures of the machine, no packages, no code, no console.
        quiet = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        run = wandb.init(
            project=attempt.project,
            group=attempt.name,
            name=f"{attempt.name}-{attempt.number}",
            config=dict(attempt.config),
            dir=str(attempt.directory),
            mode=attempt.wandb_mode,
            settings=quiet,
        )
        super().__init__(run, attempt)
