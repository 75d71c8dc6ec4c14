"""The learning-rate schedule, and how a resumed run of another length continues it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: linear warm-up over `warmup_steps` optimizer steps, then a half cosine from the peak to
    `min_lr_ratio` times the peak at the last of `total_steps`, and constant after it."""

    total_steps: int
    warmup_steps: int
    min_lr_ratio: float

    def factor(self, step: int) -> float:
        """Returns the learning rate at optimizer step `step` (from 0) as a fraction of the peak."""
        return learning_rate_factor(step, self.total_steps, self.warmup_steps, self.min_lr_ratio)

    def record(self) -> dict[str, int]:
        """Returns the part that a checkpoint keeps: `{"total_steps": 20, "warmup_steps": 5}`. The rest is configuration that may
        not change."""
        return {"total_steps": self.total_steps, "warmup_steps": self.warmup_steps}


def resumed_schedule(
    record: Mapping[str, Any] | None, planned: Schedule, asked: bool, done: int, peak: float
) -> tuple[Schedule, str | None]:
    """Returns the schedule of a run that is resumed after `done` optimizer steps, and a line for the user if its length has
    changed, else None.

    The schedule that the run began with, `record` from the checkpoint, goes on: a longer run takes its further steps at the
    schedule's final rate, and a shorter one stops on the way. Only where the user `asked` for a length is the `planned` schedule
    taken, and where `record` is None, as in older checkpoints.
    """
    if record is None:
        return planned, None
    began = Schedule(int(record["total_steps"]), int(record["warmup_steps"]), planned.min_lr_ratio)
    if began == planned:
        return planned, None
    if asked:
        now, before = (peak * schedule.factor(done) for schedule in (planned, began))
        return planned, (
            f"learning rate: from here on the schedule of {planned.total_steps:,} optimizer steps, by optimizer.schedule_steps "
            f"(the run began with {began.total_steps:,}); the next step takes {now:.3g} in place of {before:.3g}"
        )
    return began, (
        f"learning rate: goes on as it began, falling until optimizer step {began.total_steps:,}, and stays at "
        f"{peak * began.min_lr_ratio:.3g} after it (optimizer.schedule_steps sets another length)"
    )


def learning_rate_factor(step: int, total_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Returns the learning rate at optimizer step `step` (from 0) as a fraction of the peak.

    Step s of the warm-up runs at (s + 1) / warmup_steps, so that no step has a learning rate of 0. Then a half cosine falls from 1
    to `min_lr_ratio` at the last step (Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
