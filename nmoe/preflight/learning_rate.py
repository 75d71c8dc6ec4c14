"""Checks that the learning rate reaches a useful value within the first steps of a run.

A run whose warm-up is longer than the run never reaches its learning rate: it looks healthy and learns little. The
playbook therefore refuses a schedule that is under 30% of its peak at step 20. Here the highest rate of the first 20
steps counts, so that a short run whose cosine schedule has decayed by then is not refused. Supervised runs, which have
hundreds or thousands of steps, may take 5% of them, the playbook's own warm-up, if this is more than 20.
"""

from __future__ import annotations

import math
from pathlib import Path

from nmoe.config.commands import RLConfig, RunConfig, SupervisedConfig
from nmoe.config.tables.model import OptimizerSection
from nmoe.learner.schedule import Schedule, resumed_schedule
from nmoe.parsing import json_of
from nmoe.preflight.check import Check
from nmoe.recipes.setup import optimizer_settings, run_path
from nmoe.runs.checkpoint import latest_checkpoint

LEAST_SHARE = 0.3
BY_STEP = 20
WARMUP_SHARE = 0.05


def learning_rate(config: RunConfig) -> Check:
    """Checks that the first steps reach a fair share of the peak learning rate (`LEAST_SHARE` within `BY_STEP` steps), because a
    warm-up that is longer than the run trains nothing."""
    name, peak = "learning rate", config.optimizer.learning_rate
    steps = config.run.steps
    if steps == 0:
        return Check(
            name, "ok", f"peak {peak:g}; the steps of so many epochs, and with them the warm-up, depend on the records"
        )
    first = config.critic.warmup_steps if isinstance(config, RLConfig) and config.critic is not None else 0
    steps -= first
    if config.run.resume and (checkpoint := latest_checkpoint(run_path(config) / "checkpoints")) is not None:
        return Check(name, "ok", _resumed(config, first, checkpoint))
    by = BY_STEP
    if isinstance(config, SupervisedConfig):
        by = max(by, math.ceil(WARMUP_SHARE * steps))
    by = min(by, steps)
    settings = optimizer_settings(config, first=first)
    schedule = _planned(settings, steps)
    shares = [schedule.factor(step) for step in range(by)]
    share, said = max(shares), f"{max(shares):.0%} of its peak {peak:g} by step {by}"
    if share >= LEAST_SHARE:
        return Check(name, "ok", said)
    ratio, most = config.optimizer.warmup_ratio, math.floor(by / LEAST_SHARE)
    key = (
        f"warmup_ratio = {ratio:g}, which is {settings.warmup_steps} steps,"
        if ratio
        else f"warmup_steps = {settings.warmup_steps}"
    )
    said += f", and {LEAST_SHARE:.0%} are wanted: optimizer.{key} is too long; set "
    said += f"{math.floor(1e4 * most / steps) / 1e4:g} or less" if ratio else f"{most} or less"
    if config.optimizer.allow_slow_warmup:
        return Check(name, "warn", f"{said} (optimizer.allow_slow_warmup lets it start)")
    return Check(name, "fail", f"{said}, or optimizer.allow_slow_warmup = true to start as it is")


def _planned(settings: OptimizerSection, steps: int) -> Schedule:
    return Schedule(settings.schedule_steps or steps, settings.warmup_steps, settings.min_lr_ratio)


def _resumed(config: RunConfig, first: int, checkpoint: Path) -> str:
    """Returns a note on the schedule of a run that resumes from `checkpoint`; the schedule begins after the run's first
    `first` steps."""
    updates = config.batch.updates if isinstance(config, RLConfig) else 1
    settings = optimizer_settings(config, updates, first)
    file, note = checkpoint / "optimizer.json", None
    if file.exists():  # of self-play each role has its own
        state = json_of(file.read_text())
        asked, done = settings.schedule_steps > 0, state["steps"]
        planned = _planned(settings, (config.run.steps - first) * updates)
        _, note = resumed_schedule(state.get("schedule"), planned, asked, done, settings.learning_rate)
    return "goes on as the run began" if note is None else note.removeprefix("learning rate: ")
