"""Whether the disk has room for what a run keeps."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from nmoe.config.commands import RLConfig, RunConfig, SupervisedConfig
from nmoe.plan.estimate import Size
from nmoe.plan.rank_plan import gib
from nmoe.preflight.check import Check
from nmoe.recipes.setup import run_path
from nmoe.runs.directory import refuse_unless_free

# What should stay free for records, other programs and the system (prime-rl's `--check` refuses below it).
_SPARE = 5 * 2**30


def disk(
    config: RunConfig, size: Size, remedy: str = "make room, lower checkpoint.keep, or choose another run.directory"
) -> Check:
    """The checkpoints that lie side by side at the most, against what is free where they are written; `remedy` ends a failure."""
    at_once = checkpoints_at_once(config)
    needed, place = at_once * size.checkpoint, existing(run_path(config))
    free = shutil.disk_usage(place).free
    kept = f"{at_once} checkpoint{'s' * (at_once > 1)} of {gib(size.checkpoint)}"
    said = f"{kept} = {gib(needed)}, {gib(free)} free on the disk of {place}"
    if needed > free:
        return Check("disk", "fail", f"{said}: {remedy}")
    if free - needed < _SPARE:
        return Check("disk", "warn", f"{said}: less than {gib(_SPARE)} would be left; make room")
    return Check("disk", "ok", said)


def room(config: RunConfig) -> Check:
    """What is free on the disk, where the model whose checkpoints go there is not known."""
    place = existing(run_path(config))
    free = shutil.disk_usage(place).free
    said = f"{gib(free)} free on the disk of {place}; what checkpoints take is not known without the model"
    return Check("disk", "warn", said)


def first_checkpoint(config: RunConfig, size: Size) -> Check:
    """Whether one checkpoint fits, without which a run has nothing to go on from."""
    place = existing(run_path(config))
    free = shutil.disk_usage(place).free
    said = f"a checkpoint has {gib(size.checkpoint)}, {gib(free)} free on the disk of {place}"
    if size.checkpoint > free:
        return Check("disk", "fail", f"{said}: make room, or choose another run.directory")
    return Check("disk", "ok", said)


def checkpoints_at_once(config: RunConfig) -> int:
    """The newest that are kept, the best, and the one being written; fewer where the run saves less often."""
    steps, every = config.run.steps, config.checkpoint.every_steps
    evaluated = isinstance(config, SupervisedConfig | RLConfig) and bool(config.eval)
    most = config.checkpoint.keep + evaluated + 1
    return most if steps == 0 or evaluated else min(most, math.ceil(steps / every))


def directory(config: RunConfig) -> Check:
    """Whether the run's directory can be written, and is free or can be resumed. Raises UserError."""
    path = run_path(config)
    refuse_unless_free(path, config.run.resume)
    if not os.access(above := existing(path), os.W_OK | os.X_OK):
        text = f"{above} cannot be written; permit it, or choose another run.directory"
        return Check("run directory", "fail", text)
    resumed = config.run.resume and (path / "config.toml").exists()
    return Check("run directory", "ok", f"{path} {'is resumed' if resumed else 'is free'}")


def existing(path: Path) -> Path:
    """The directory that is there already, at `path` or above it."""
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())
