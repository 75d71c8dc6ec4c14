"""The learning-rate schedule, and how a run that is resumed with another length continues it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over `warmup_steps` optimizer steps, then a half cosine from 1 to `min_lr_ratio` at the last of `total_steps`,
    where it stays."""

    total_steps: int
    warmup_steps: int
    min_lr_ratio: float

    def factor(self, step: int) -> float:
        """The share of the peak learning rate at optimizer step `step` (from 0)."""
        return learning_rate_factor(step, self.total_steps, self.warmup_steps, self.min_lr_ratio)

    def record(self) -> dict[str, int]:
        """The part that a checkpoint keeps: `{"total_steps": 20, "warmup_steps": 5}`. The rest is configuration that may not
        change."""
        return {"total_steps": self.total_steps, "warmup_steps": self.warmup_steps}


def resumed_schedule(
    record: Mapping[str, Any] | None, planned: Schedule, asked: bool, done: int, peak: float
) -> tuple[Schedule, str | None]:
    """The schedule of a run that is resumed after `done` optimizer steps, and a line about it if its length has changed.

    The schedule that the run began with, `record`, goes on: a longer run takes its further steps at the rate where it ends, and a
    shorter one stops on the way. Only where the user `asked` for a length is the `planned` schedule taken. None is the record of
    an older checkpoint, which has none.
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
    """The share of the peak learning rate at optimizer step `step` (from 0).

    Step s of the warm-up runs at (s + 1) / warmup_steps, so that no step has a learning rate of 0. Then a half cosine falls from 1
    to `min_lr_ratio` at the last step (Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
