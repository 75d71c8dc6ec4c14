"""Checks that a run fits into the memory of this machine or its GPU, and onto the disk."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import TypeVar

import torch

from nmoe.config.commands import RLConfig, RunConfig, SupervisedConfig, VerifierConfig
from nmoe.model.device import choose_device, kind_of
from nmoe.parallel.gang import gang
from nmoe.plan.estimate import Size
from nmoe.plan.rank_plan import RankPlan, advice, gib, lines, parts, plan, with_offload
from nmoe.plan.work import prompts_of
from nmoe.preflight.check import Check
from nmoe.preflight.doctor import machine_memory
from nmoe.recipes.setup import run_path
from nmoe.runs.directory import refuse_unless_free

C = TypeVar("C", bound=RunConfig)


def memory(config: RunConfig) -> Check:
    """Checks the estimated memory of a rank (one training process) against its total and free memory."""
    planned = plan(settled(config), gang().size, gang().local_size, prompts_of(config))
    total, free = memory_of_rank(planned)
    said = f"about {parts(planned)}"
    if total == 0:
        return Check("memory", "ok", f"{said}; what this machine has is not known")
    said += f", {gib(free)} free of {gib(total)} on {planned.device.type}"
    if planned.total > total:
        return Check("memory", "fail", f"{said}: {advice(planned)}")
    if planned.total > free:
        return Check("memory", "warn", f"{said}: end other programs, or lower batch.tokens_per_microbatch")
    return Check("memory", "ok", said)


def memory_alone(config: RunConfig) -> Check:
    """Reports the available memory, for a run whose model, and so whose need of memory, is unknown."""
    device = choose_device(config.model.device)
    total, free = memory_of(device)
    there = f"{gib(free)} free of {gib(total)} on {device.type}" if total else "what this machine has is not known"
    return Check("memory", "warn", f"{there}; what the run takes is not known without its model")


def weights_fit(config: RunConfig, size: Size) -> Check:
    """Checks that the least that a rank needs fits its total memory: weights and, if they are trained, gradients and
    optimizer state.

    Raises UserError as `plan` does.
    """
    held = {"weights": size.weights, "gradients": size.gradients, "optimizer": size.optimizer}
    # Of several ranks each may hold a part, which is counted where the whole does not fit.
    total, _ = memory_of(size.device)
    if size.device.type == "cpu":
        total //= gang().local_size
    if gang().size > 1 and sum(held.values()) > total:
        planned = plan(settled(config), gang().size, gang().local_size).held
        held = {name: planned.get(name, 0) for name in held}
    if not config.trains or (isinstance(config, VerifierConfig) and config.verifier.trains_head_alone):
        held = {"weights": held["weights"]}
    said = ", ".join(f"{name} {gib(count)}" for name, count in held.items())
    if not 0 < total < sum(held.values()):
        return Check("memory", "ok", f"{said}, of {gib(total)} on {size.device.type}")
    helps = (
        "a smaller model" + (", an adapter by [lora]" if len(held) > 1 and not size.adapts else "") + " or more ranks"
    )
    said += f", which alone do not fit the {gib(total)} that {size.device.type} has in all"
    return Check("memory", "fail", f"{said}; what helps: {helps}")


def said_at_the_start(config: RunConfig) -> list[str]:
    """Returns the lines about memory to print when a run starts.

    This is one line for a single process with enough memory, else the memory and network traffic of each rank, and how
    to reduce them. Raises UserError as `plan` does.
    """
    planned = plan(config, gang().size, gang().local_size, prompts_of(config))
    total, _ = memory_of_rank(planned)
    if planned.world == 1 and planned.total <= (total or planned.total):
        return [f"memory: about {parts(planned)}" + (f", of {gib(total)}" if total else "")]
    return lines(planned, total or None)


def settled(config: C) -> C:
    """Returns the configuration with parallel.offload = "auto" replaced by the choice for this machine. Raises
    UserError as `plan` does."""
    device = choose_device(config.model.device)
    if kind_of(device).on_host:
        return config
    return with_offload(config, gang().size, gang().local_size, memory_of(device)[0])


def memory_of_rank(planned: RankPlan) -> tuple[int, int]:
    """Returns the total and free memory of a rank in bytes; CPU ranks share the machine's memory, and each GPU rank has
    its own GPU."""
    total, free = memory_of(planned.device)
    each = gang().local_size if planned.device.type == "cpu" else 1
    return total // each, free // each


def memory_of(device: torch.device) -> tuple[int, int]:
    """Returns the total and free memory of a device in bytes; (0, 0) if unknown.

    For a CPU this is the machine's memory, limited by the control group of this process.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    machine = machine_memory()
    if not machine:
        return 0, 0
    total, free = machine["memory_bytes"], machine["free_memory_bytes"]
    limit = _group_limit()
    return min(total, limit), min(free, limit)


def _group_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the memory limit in bytes of this process's control group (as in a container); 2**63 without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        file = root / name
        if file.exists() and (text := file.read_text().strip()).isdigit():
            return int(text)
    return 2**63


# What should stay free for records, other programs and the system (prime-rl's `--check` refuses below it).
_SPARE = 5 * 2**30


def disk(
    config: RunConfig, size: Size, remedy: str = "make room, lower checkpoint.keep, or choose another run.directory"
) -> Check:
    """Checks that the free disk space suffices for all checkpoints that exist at the same time; `remedy` ends the text
    of a failure."""
    at_once = checkpoints_at_once(config)
    needed, folder = at_once * size.checkpoint, existing(run_path(config))
    free = shutil.disk_usage(folder).free
    kept = f"{at_once} checkpoint{'s' * (at_once > 1)} of {gib(size.checkpoint)}"
    said = f"{kept} = {gib(needed)}, {gib(free)} free on the disk of {folder}"
    if needed > free:
        return Check("disk", "fail", f"{said}: {remedy}")
    if free - needed < _SPARE:
        return Check("disk", "warn", f"{said}: less than {gib(_SPARE)} would be left; make room")
    return Check("disk", "ok", said)


def room(config: RunConfig) -> Check:
    """Reports the free disk space, for a run whose model, and so the size of its checkpoints, is unknown."""
    folder = existing(run_path(config))
    free = shutil.disk_usage(folder).free
    said = f"{gib(free)} free on the disk of {folder}; what checkpoints take is not known without the model"
    return Check("disk", "warn", said)


def first_checkpoint(config: RunConfig, size: Size) -> Check:
    """Checks that the free disk space suffices for one checkpoint, the least that a run needs to be resumable."""
    folder = existing(run_path(config))
    free = shutil.disk_usage(folder).free
    said = f"a checkpoint has {gib(size.checkpoint)}, {gib(free)} free on the disk of {folder}"
    if size.checkpoint > free:
        return Check("disk", "fail", f"{said}: make room, or choose another run.directory")
    return Check("disk", "ok", said)


def checkpoints_at_once(config: RunConfig) -> int:
    """Returns the largest number of checkpoints on disk at the same time.

    They are the kept ones, the best one, and the one that is being written; fewer if a run saves less often.
    """
    steps, every = config.run.steps, config.checkpoint.every_steps
    evaluated = isinstance(config, SupervisedConfig | RLConfig) and bool(config.eval)
    most = config.checkpoint.keep + evaluated + 1
    return most if steps == 0 or evaluated else min(most, math.ceil(steps / every))


def directory(config: RunConfig) -> Check:
    """Checks that the run's directory is writable, and that it is new or can be resumed. Raises UserError if it is neither."""
    path = run_path(config)
    refuse_unless_free(path, config.run.resume)
    if not os.access(above := existing(path), os.W_OK | os.X_OK):
        text = f"{above} cannot be written; permit it, or choose another run.directory"
        return Check("run directory", "fail", text)
    resumed = config.run.resume and (path / "config.toml").exists()
    return Check("run directory", "ok", f"{path} {'is resumed' if resumed else 'is free'}")


def existing(path: Path) -> Path:
    """Returns the nearest directory that exists, which is `path` or one of its parents."""
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())
