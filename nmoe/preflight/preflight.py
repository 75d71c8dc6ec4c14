"""The checks of a configuration: all of them for `nmoe preflight`, and at the start of a run those that take no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.commands.base import RunConfig, SupervisedConfig
from nmoe.config.commands.rl import RLConfig
from nmoe.config.commands.supervised import RecordsConfig
from nmoe.errors import InfrastructureError, UserError
from nmoe.model.device import choose_device
from nmoe.parallel.gang import gang
from nmoe.parallel.ranks import offloads
from nmoe.plan.size import size_of
from nmoe.preflight.check import Check
from nmoe.preflight.disk import directory, disk, first_checkpoint
from nmoe.preflight.learning_rate import learning_rate
from nmoe.preflight.memory import memory
from nmoe.preflight.needs import hub, packages, services
from nmoe.preflight.overlap import overlap
from nmoe.preflight.rehearsal import rehearse, round_trip
from nmoe.preflight.sinks import sinks
from nmoe.recipes.setup import load_tokenizer, run_path
from nmoe.rl.episodes import with_steps_of_episodes
from nmoe.runs.directory import refuse_unless_free
from nmoe.sandbox.api import SandboxSetupError


def preflight(config: RunConfig) -> Iterator[Check]:
    """Yields the result of each check as soon as it is known."""
    if isinstance(config, RLConfig):
        try:
            config = with_steps_of_episodes(config)
        except UserError as error:
            yield failure("episodes", error)
            return
    yield from checked("learning rate", lambda: learning_rate(config))
    if isinstance(config, SupervisedConfig | RLConfig):
        yield Check("batch", "ok", "; ".join(batch_arithmetic(config)))
    yield from checked("run directory", lambda: directory(config))
    yield from checked("sinks", lambda: sinks(config.sinks))
    yield from checked("packages", lambda: packages(config))
    yield from checked("hub", lambda: hub(config))
    yield from checked("services", lambda: services(config))
    try:
        size = size_of(config)
    except UserError as error:
        yield failure("model", error)
        return
    trained = "all trained" if size.trained == size.parameters else f"{size.trained:,} trained"
    precision = str(size.dtype).removeprefix("torch.")
    yield Check("model", "ok", f"{size.parameters:,} parameters, {trained}, in {precision} on {size.device}")
    yield from checked("memory", lambda: memory(config))
    yield from checked("disk", lambda: disk(config, size))
    if isinstance(config, RecordsConfig | RLConfig):
        yield from checked("held-out problems", lambda: overlap(config))
    if isinstance(config, RLConfig):
        try:
            yield from rehearse(config)
        except (UserError, InfrastructureError) as error:
            yield failure("sandbox" if isinstance(error, SandboxSetupError) else "rehearsal", error)
    else:
        yield from checked("tokenizer", lambda: round_trip(load_tokenizer(config.model)))


def refuse_to_start(config: RunConfig) -> None:
    """What a training command asks before it starts. Raises UserError with each check that fails, one line each.

    A run that is to be resumed has to be there. What cannot be checked, such as the size of a model whose checkpoint is missing, is
    left to the run, which says so itself. A run that is resumed keeps the schedule it has."""
    if config.run.resume:
        refuse_unless_free(run_path(config), config.run.resume)
    found = []
    if not (config.run.resume and (run_path(config) / "config.toml").exists()):
        if isinstance(config, RLConfig):
            config = with_steps_of_episodes(config)
        found.append(learning_rate(config))
    found.append(services(config))
    offloads(config.parallel, gang().size, choose_device(config.model.device).type)
    with suppress(UserError):
        found.append(first_checkpoint(config, size_of(config)))
    if failed := [check for check in found if check.status == "fail"]:
        raise UserError("\n".join(f"{check.name}: {check.text}" for check in failed))


def checked(name: str, check: Callable[[], Check]) -> Iterator[Check]:
    """The result of a check; bad input that it meets is a failure of it."""
    try:
        yield check()
    except UserError as error:
        yield failure(name, error)


def failure(name: str, error: Exception) -> Check:
    """A check that bad input ended, in one line."""
    return Check(name, "fail", " ".join(str(error).split()))
