"""Runs the checks of a configuration: all of them for `nmoe preflight`, and the quick ones at the start of every run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.commands import RecordsConfig, RLConfig, RunConfig, SupervisedConfig
from nmoe.errors import InfrastructureError, UserError
from nmoe.model.device import choose_device, kind_of
from nmoe.parallel.gang import gang
from nmoe.parallel.ranks import offloads
from nmoe.plan.estimate import Size, size_of
from nmoe.preflight.check import Check, checked, failure
from nmoe.preflight.learning_rate import learning_rate
from nmoe.preflight.needs import data, hub, lacking_of_hub, packages, services, sinks
from nmoe.preflight.overlap import overlap
from nmoe.preflight.rehearsal import rehearse, round_trip
from nmoe.preflight.resources import directory, disk, first_checkpoint, memory, memory_alone, room, weights_fit
from nmoe.recipes.setup import device_and_dtype, load_tokenizer, run_path
from nmoe.rl.episodes import with_steps_of_episodes
from nmoe.runs.directory import refuse_unless_free
from nmoe.sandbox.api import SandboxSetupError


def preflight(config: RunConfig) -> Iterator[Check]:
    """Runs all checks of a configuration, and yields each result as soon as it is known.

    If a check fails, the others still run, except checks that need what the failed one could not read.
    """
    readable = True
    for check in data(config):
        readable = readable and check.status == "ok"
        yield check
    yield from checked("hub", lambda: hub(config))
    absent = lacking_of_hub(config)
    readable = readable and not absent.keys() - {config.model.path}
    if isinstance(config, RLConfig) and readable:
        try:
            config = with_steps_of_episodes(config)
        except UserError as error:
            yield failure("episodes", error)
    if config.run.steps or not isinstance(config, RLConfig):
        yield from checked("learning rate", lambda: learning_rate(config))
    else:
        yield Check("learning rate", "warn", "not checked: how many steps the episodes take depends on the data")
    if isinstance(config, SupervisedConfig | RLConfig):
        yield Check("batch", "ok", "; ".join(batch_arithmetic(config)))
    yield from checked("run directory", lambda: directory(config))
    yield from checked("sinks", lambda: sinks(config.sinks))
    yield from checked("packages", lambda: packages(config))
    yield from checked("services", lambda: services(config))
    on_device = config
    try:
        device, _ = device_and_dtype(config.model)
        yield Check("device", "ok", kind_of(device).describe(device))
    except UserError as error:
        yield failure("device", error)
        on_device = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})
    size = None
    if config.model.path in absent:
        yield Check("model", "warn", "not known: the hub does not give it")
    else:
        try:
            size = size_of(on_device)
            yield _model(size)
        except UserError as error:
            yield failure("model", error)
    if size is None:
        yield memory_alone(on_device)
        yield room(config)
    else:
        yield from checked("memory", lambda: memory(on_device))
        yield from checked("disk", lambda: disk(config, size))
    if size is None or not readable or on_device is not config:
        yield Check("rehearsal", "warn", "not done: it needs the device, the model and the data")
        return
    if isinstance(config, RecordsConfig | RLConfig):
        yield from checked("held-out problems", lambda: overlap(config))
    if isinstance(config, RLConfig):
        try:
            yield from rehearse(config)
        except (UserError, InfrastructureError) as error:
            yield failure("sandbox" if isinstance(error, SandboxSetupError) else "rehearsal", error)
    else:
        yield from checked("tokenizer", lambda: round_trip(load_tokenizer(config.model)))


def _model(size: Size) -> Check:
    trained = "all trained" if size.trained == size.parameters else f"{size.trained:,} trained"
    precision = str(size.dtype).removeprefix("torch.")
    return Check("model", "ok", f"{size.parameters:,} parameters, {trained}, in {precision} on {size.device}")


def refuse_to_start(config: RunConfig) -> None:
    """Runs the quick checks before a training command starts. Raises UserError with one line for each failed check.

    To resume a run, its directory has to exist; its schedule is then not checked, because the run keeps it. A check
    that cannot be made, as for a missing checkpoint, is skipped, because the run itself will report that error.
    """
    if config.run.resume:
        refuse_unless_free(run_path(config), config.run.resume)
    found = []
    if not (config.run.resume and (run_path(config) / "config.toml").exists()):
        if isinstance(config, RLConfig):
            config = with_steps_of_episodes(config)
        found.append(learning_rate(config))
    found.append(services(config))
    if isinstance(config, RecordsConfig | RLConfig):
        with suppress(UserError):
            found.append(overlap(config))
    offloads(config.parallel, gang().size, choose_device(config.model.device).type)
    with suppress(UserError):
        size = size_of(config)
        found += [weights_fit(config, size), first_checkpoint(config, size)]
    if failed := [check for check in found if check.status == "fail"]:
        raise UserError("\n".join(f"{check.name}: {check.text}" for check in failed))
