"""The engine that a run's rollouts are sampled with: in this process, on its ranks, or on engine servers."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from nmoe.config.registry import ENGINES
from nmoe.config.tables.asynchrony import AsyncSection
from nmoe.config.tables.rollout import RolloutEngineSection, fault_of_urls
from nmoe.engine.api import Engine, Request
from nmoe.engine.function import FunctionEngine
from nmoe.engine.rank_sampling import sampling_engine
from nmoe.engine.remote.fleet import Address
from nmoe.engine.remote.weights import Format
from nmoe.errors import UserError
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.passes import MicroBatches, deal
from nmoe.model.checkpoint import checkpoint_tensors, packed_form
from nmoe.model.device import dtype_for
from nmoe.model.lora import Lora
from nmoe.model.policy import load_policy, sampling_precision
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import gang
from nmoe.rl.canary import LearnerCanary
from nmoe.runs.directory import LOGS
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.types import Sample

R = TypeVar("R")


class Frozen:
    """A checkpoint's model in the role of a learner that publishes it."""

    def __init__(self, model: Transformer, lora: Lora | None) -> None:
        self.model, self.lora, self.ahead = model, lora, 0

    def on_each_rank(self, function: Callable[[MicroBatches], R], batch: Batch) -> list[R]:
        (micros,) = deal(batch, batch.tokens, 1)
        return [function(micros)]

    def weights(self, format: Format) -> Iterator[tuple[str, Tensor]]:
        for name, _, make in checkpoint_tensors(self.model, own_format=format == "nmoe"):
            yield name, make()


def publish_checkpoint(checkpoint: Path, urls: Sequence[str], note: Callable[[str], None]) -> dict[str, float]:
    """Sends a checkpoint's weights to running engine servers, an adapter's alone if it is one, under the version after their
    latest, and compares their samples with the model here. Returns the figures of the publication. Raises UserError for a
    checkpoint or servers that cannot be used, and InfrastructureError if no server takes the weights."""
    from nmoe.engine.remote.described import precision_of
    from nmoe.engine.remote.process import KEY, RunningServer
    from nmoe.engine.remote.published import PublishedFleet

    if (problem := fault_of_urls(urls)) is not None:
        raise UserError(problem)
    directory, device = resolve_checkpoint(checkpoint), torch.device("cpu")
    precision = precision_of(urls[0]) or sampling_precision(directory, device, None)
    model, lora = load_policy(directory, dtype_for(device, precision), device)
    source = Frozen(model.requires_grad_(False), lora)
    fleet = PublishedFleet(
        [RunningServer(url) for url in urls],
        source,
        model.config,
        LearnerCanary(source),
        transport="disk" if lora is None else "adapter",
        format=None,
        precision=precision,
        token_s=1.0,
        key=os.environ.get(KEY, ""),
        note=note,
    )
    with fleet:
        fleet.run(fleet.update_weights(model, 1 + max(fleet.versions(), default=0)))
        return fleet.metrics()


@contextmanager
def own_engine(section: RolloutEngineSection, learner: Learner) -> Iterator[Engine]:
    """Makes the user's engine that [engine] names, whose samples are checked. Raises UserError if it cannot be made."""
    named = f"engine.kind = {section.kind!r}"
    if gang().size > 1:
        raise UserError(
            f"{named}: several ranks have a part of the weights each; train in one process, or with `server`"
        )
    try:
        made = ENGINES.get(section.kind)(section, learner.model)
    except Exception as error:
        raise UserError(
            f"{named} cannot be called with [engine] and the model: {type(error).__name__}: {error}"
        ) from error
    methods = [name for name, value in vars(Engine).items() if callable(value) and name[0] != "_"]
    if missing := [name for name in methods if not callable(getattr(made, name, None))]:
        raise UserError(f"{named} has no {', '.join(missing)}; nmoe.engine.api.Engine says what each does")
    with made if hasattr(made, "__enter__") else nullcontext():

        async def generate(request: Request, engine: Engine) -> list[Sample]:
            return await engine.generate(request)

        yield FunctionEngine(made, generate, lambda: learner.version, learner.model.config, named)


def export_base(section: RolloutEngineSection, learner: Learner, directory: Path) -> None:
    """Writes the checkpoint that engine servers are started on."""
    if section.kind != "server":
        learner.export(directory, "hf")
    else:
        learner.export(directory, "peft" if section.transport(learner.lora is not None) == "adapter" else "nmoe")


@contextmanager
def rollout_engine(
    section: RolloutEngineSection,
    learner: Learner,
    directory: Path,
    note: Callable[[str], None],
    asynchrony: AsyncSection = AsyncSection(),
) -> Iterator[Engine]:
    """Opens the engine that [engine] asks for, with the learner's weights. Servers that the run starts end with the block; their
    logs are in `directory`/engines. `asynchrony` says whether they sample while the learner trains. Raises UserError for servers
    that cannot be used."""
    if section.kind == "native":
        yield sampling_engine(learner, section.max_sequences, section.cache_mb, section.expert_parallel)
        return
    if section.kind in ENGINES:
        with own_engine(section, learner) as engine:
            learner.hand_over(engine)
            yield engine
        return
    from nmoe.engine.remote.launcher import LocalLauncher
    from nmoe.engine.remote.process import KEY, RunningServer, addresses
    from nmoe.engine.remote.published import PublishedFleet
    from nmoe.engine.remote.server import EngineServer
    from nmoe.engine.remote.sglang import SGLangServer

    if section.kind == "sglang":
        note("engine.kind=sglang is unproven: no run over SGLang was tried; watch mismatch_abs_mean and canary_abs_max")
    key = os.environ.get(KEY, "") if section.urls else secrets.token_hex(16)
    shared = section.shared()
    transport = section.transport(learner.lora is not None)
    format_: Format = "nmoe" if section.kind == "server" else "hf"
    model, base = learner.model, Path(tempfile.mkdtemp(prefix="nmoe_base_"))
    packed, checkpoint = packed_form(model), base
    try:
        if packed is not None and section.kind != "server":
            assert learner.lora is not None, "packed experts are trained by an adapter"
            checkpoint = Path(learner.lora.base)  # as it was released
        elif not section.urls:
            export_base(section, learner, base)
        dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
        servers: Sequence[Address] = [RunningServer(url) for url in section.urls] or addresses(
            section,
            checkpoint,
            "exact" if model.exact else "fast",
            dtype,
            model.device.type == "cpu",
            key,
            LocalLauncher(directory / LOGS),
            gang().local_size,
            packed or "dequantized",
        )
        fleet = PublishedFleet(
            servers,
            learner,
            model.config,
            LearnerCanary(learner),
            transport=transport,
            format=format_,
            backend=section.group_backend,
            workers=section.tensor_parallel,
            shared=shared,
            precision=dtype,
            token_s=section.token_s,
            key=key,
            note=note,
            speaks=SGLangServer if section.kind == "sglang" else EngineServer,
            wait_s=section.wait_s,
            in_flight=asynchrony.in_flight,
            # The canary's samples find room beside the others.
            most=section.max_sequences - section.max_sequences // 16 if asynchrony.max_staleness else None,
        )
        with fleet:
            learner.hand_over(fleet)
            yield fleet
    finally:
        shutil.rmtree(base, ignore_errors=True)
