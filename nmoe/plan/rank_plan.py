"""Plans the memory and network traffic of each rank of a distributed run, before a machine is rented: `nmoe plan`.

The shards of parameters follow from the sharding rules of the training code. Activations are an estimate, and the
traffic follows from the communication of FSDP2 and of expert parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeVar

import torch
from torch import nn

from nmoe.config.commands import PretrainConfig, RecordsConfig, RLConfig, RunConfig, SelfplayConfig, VerifierConfig
from nmoe.config.tables.model import Offload
from nmoe.learner.muon import hidden_matrices
from nmoe.model.config import ModelConfig
from nmoe.model.device import kind_of
from nmoe.model.transformer import Transformer
from nmoe.parallel.axes import Axes, expert_axis
from nmoe.parallel.ranks import axes_here
from nmoe.plan.estimate import Size, activation_bytes, estimate, profiled_numbers, samples_here, size_of
from nmoe.plan.work import Prompts, work_of

C = TypeVar("C", bound=RunConfig)

_FLOAT = 4


@dataclass(frozen=True)
class RankPlan:
    """The memory and traffic of rank 0, in bytes by component; other ranks hold at most as much.

    `held` is the device memory during training, including weights that FSDP gathers, and `host` the memory that
    parallel.offload moves to the machine. `sent` is the traffic of one optimizer step. `remedies` lists settings that
    reduce the memory, in the order to try them.
    """

    axes: Axes
    world: int
    device: torch.device
    parameters: int
    local_parameters: int
    held: dict[str, int]
    host: dict[str, int]
    sent: dict[str, int]
    remedies: list[str]

    @property
    def total(self) -> int:
        return sum(self.held.values())


def plan(
    config: RunConfig, world: int, per_node: int, prompts: Prompts | None = None, shape: ModelConfig | None = None
) -> RankPlan:
    """Plans the memory and traffic of a run on `world` ranks, `per_node` of them on each node.

    Without `prompts`, prompts are as long as the configuration permits. `shape` is of a model that is yet to be made. Raises
    UserError if the sizes in [parallel] do not fit the ranks, a checkpoint is missing, or the machine lacks the device.
    """
    size = size_of(config, shape)
    with torch.device("meta"):
        model = Transformer(size.shape)
        if (form := config.model.expert_weights) != "dequantized":
            for moe in model.moe_layers():
                moe.pack(form)
    axes = axes_here(config.parallel, world, per_node, 0 if size.packed else size.shape.routed_experts)
    return _counted(config, size, Parts.of(model, axes, config.optimizer.kind), axes, world, prompts)


def with_offload(config: C, world: int, per_node: int, memory: int) -> C:
    """Returns the configuration with parallel.offload = "auto" replaced by the choice for GPUs with `memory` bytes.

    The choice is "cpu" if the run fits only with offloading, else "none". Raises UserError as `plan` does.
    """

    def offloading(offload: Offload) -> C:
        return config.model_copy(update={"parallel": config.parallel.model_copy(update={"offload": offload})})

    if config.parallel.offload != "auto":
        return config
    if world == 1 or plan(config, world, per_node).total <= memory:
        return offloading("none")
    return offloading("cpu" if plan(offloading("cpu"), world, per_node).total <= memory else "none")


@dataclass(frozen=True)
class Part:
    """How a parameter is sharded: how many of its numbers rank 0 holds, how many the `ranks` that share it hold together, and
    whether Muon trains it."""

    local: int
    together: int
    ranks: int
    by_muon: bool


@dataclass(frozen=True)
class Parts:
    """How the parameters of a model are sharded: those in each transformer block, and those outside of the blocks."""

    blocks: list[list[Part]]
    outside: list[Part]

    @classmethod
    def of(cls, model: Transformer, axes: Axes, kind: Literal["adamw", "muon"]) -> Parts:
        stacked = {parameter for moe in model.moe_layers() for parameter in moe.parameters(recurse=False)}
        inside = {parameter for block in model.blocks for parameter in block.parameters()}

        matrices = {model.get_parameter(name) for name in hidden_matrices(model)} if kind == "muon" else set()

        def part(parameter: nn.Parameter) -> Part:
            shape, ep, ranks, axis = parameter.shape, 1, axes.dp_shard, 0
            if parameter in stacked:
                ep, ranks = axes.ep, axes.efsdp
                shape = torch.Size([shape[0] // ep, *shape[1:]])
                axis = expert_axis(shape, ranks, ep)
            # Rank 0 has the first of equal pieces, of which the last may be shorter.
            first = math.ceil(shape[axis] / ranks)
            return Part(shape.numel() // max(1, shape[axis]) * first, shape.numel(), ranks, parameter in matrices)

        outside = [part(one) for one in model.parameters() if one not in inside]
        return cls([[part(one) for one in block.parameters()] for block in model.blocks], outside)

    def all(self) -> list[Part]:
        return [*chain.from_iterable(self.blocks), *self.outside]


def _counted(config: RunConfig, size: Size, parts: Parts, axes: Axes, world: int, prompts: Prompts | None) -> RankPlan:
    width, on_host = size.dtype.itemsize, kind_of(size.device).on_host
    work = work_of(config, size.shape.context_tokens, prompts, world)
    activations = activation_bytes(size.shape, work, width, config.model.checkpoint_activations, on_host)
    here = sum(part.local for part in parts.all())
    # An adapter and a head are not sharded.
    trained = 0 if not config.trains else size.trained if size.adapts else here
    by_muon = sum(part.local for part in parts.all() if part.by_muon) if trained and not size.adapts else 0
    held = {
        "weights": here * width + size.packed_bytes + (size.trained * width if size.adapts else 0),
        "gradients": trained * _FLOAT,
        "optimizer": (trained * (2 if size.dtype == torch.float32 else 3) - by_muon) * _FLOAT,
        "activations": config.trains * activations,
    }
    blocks = sorted((sum(part.together for part in block) for block in parts.blocks), reverse=True)
    outside = sum(part.together for part in parts.outside)
    if world > 1:
        # The block that runs and the one that is fetched meanwhile; the gradient of one before ranks have shared it out.
        held["gathered blocks"] = (sum(blocks[:2]) + outside) * width
        held["gradient of a block"] = 0 if size.adapts else max(blocks[0], outside) * _FLOAT
    whole = estimate(config, size, work)
    if (copy := "copy for a checkpoint") in whole:
        # What every rank has whole, the first one writes.
        held[copy] = whole[copy] if world == 1 or size.adapts else here * width + held["optimizer"]
    if "reference" in whole:
        held["reference"] = whole["reference"] if world == 1 or size.adapts else here * width
    for name in (
        "other models",
        "sampled tokens",
        "key-value cache",
        "weights packed to sample",
        "weights published last",
        "program",
    ):
        if name in whole:
            held[name] = whole[name]
    profiled = profiled_numbers(config, size.shape)
    # Ranks quantise what they gather, which lives until the backward pass; a recomputed block needs its own alone.
    layers = len(size.shape.moe_layers) if world > 1 and config.model.checkpoint_activations else 1
    held["experts in their profile"] = profiled * width // (axes.ep * max(1, layers))
    if world > 1 and samples_here(config):
        assert isinstance(config, RLConfig | SelfplayConfig), "only these sample"
        divided = config.engine.expert_parallel
        weights = sum(part.together for part in parts.all()) if divided else size.parameters - size.packed
        held["weights to sample"] = (weights + profiled // (axes.ep if divided else 1)) * width
    held = {name: count for name, count in held.items() if count}
    host = {}
    if world > 1 and config.parallel.offload == "cpu":
        # An adapter and its optimizer stay.
        host["weights"] = here * width
        moved = () if size.adapts else ("gradients", "optimizer", "reference")
        host |= {name: held.pop(name) for name in moved if name in held}
        held["weights"] -= host["weights"]
    sent = _sent(config, size, parts, axes, world)
    return RankPlan(
        axes, world, size.device, size.parameters, here + size.packed, held, host, sent, _remedies(config, size, axes)
    )


def _sent(config: RunConfig, size: Size, parts: Parts, axes: Axes, world: int) -> dict[str, int]:
    """Returns the bytes that a rank sends in one optimizer step with the most possible tokens, by kind of communication.

    In a ring of n ranks, a rank sends (n - 1) / n of the bytes that are gathered or scattered, and twice as many for a
    sum.
    """
    if world == 1:
        return {}
    width, tokens = size.dtype.itemsize, math.ceil(tokens_of_step(config) / world)
    passes = max(1, math.ceil(tokens / config.batch.tokens_per_microbatch))
    gathers = 3 if config.model.checkpoint_activations else 2

    def ring(n: int) -> float:
        return (n - 1) / n

    gather = scatter = replicas = 0.0
    for part in parts.all():
        gather += part.together * ring(part.ranks) * width * min(gathers, 2)
        if not size.adapts:
            scatter += part.together * ring(part.ranks) * _FLOAT
            replicas += 2 * part.local * ring(axes.dp_replicate) * _FLOAT
    shape = size.shape
    rows = tokens * shape.experts_per_token * len(shape.moe_layers)
    sent = {
        "gathered weights": int(gather * passes),
        "scattered gradients": int(scatter * passes),
        "sums over replicas": int(replicas * passes),
        # To the experts and back, forward and backward, and forward again where activations are recomputed.
        "rows to experts": int(rows * shape.hidden_size * width * 2 * gathers * ring(axes.ep)),
    }
    moves_adapter = isinstance(config, RLConfig) and config.engine.transport(size.adapts) == "adapter"
    if isinstance(config, RLConfig | SelfplayConfig) and not moves_adapter:
        sent["weights to sample"] = int(size.in_full * ring(axes.dp_shard))
    return {name: count for name, count in sent.items() if count}


def tokens_of_step(config: RunConfig) -> int:
    """Returns the largest number of tokens of one optimizer step; in reinforcement learning, prompts are not counted."""
    if isinstance(config, PretrainConfig):
        return config.data.tokens_per_step
    if isinstance(config, VerifierConfig):
        return config.verifier.tokens_per_step
    if isinstance(config, RecordsConfig):
        return config.records.tokens_per_step
    assert isinstance(config, RLConfig | SelfplayConfig), "only these sample"
    samples = config.batch.prompts_per_step * config.batch.group_size
    updates = config.batch.updates_per_step if isinstance(config, RLConfig) else 1
    return samples * config.sampling.max_new_tokens // updates


def _remedies(config: RunConfig, size: Size, axes: Axes) -> list[str]:
    """Returns the settings that reduce a rank's memory, the cheapest first."""
    found = []
    if size.dtype == torch.float32 and size.device.type == "cuda":
        found.append('model.precision = "bfloat16"')
    if not config.model.checkpoint_activations:
        found.append("model.checkpoint_activations = true")
    found.append(f"batch.tokens_per_microbatch below {config.batch.tokens_per_microbatch:,}")
    if samples_here(config):
        found.append("engine.cache_mb, lower")
        found.append('engine.kind = "vllm", on other GPUs')
    if not size.adapts:
        found.append("an adapter, by [lora]")
    if config.parallel.offload != "cpu":
        found.append('parallel.offload = "cpu", on GPUs of several ranks')
    if axes.dp_replicate > 1:
        found.append(f"parallel.dp_replicate below {axes.dp_replicate}")
    found.append("more ranks")
    return found


def gib(count: float) -> str:
    """Formats a number of bytes, as `2.0 GiB` or `0.5 MiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def lines(plan: RankPlan, memory: int | None) -> list[str]:
    """Returns the lines that `nmoe plan` prints: a rank's memory and traffic, and whether it fits into `memory` bytes,
    if given."""
    share = plan.local_parameters * plan.world / (plan.parameters * plan.axes.dp_replicate)
    found = [
        plan.axes.said or "parallel: one rank",
        f"{plan.parameters:,} parameters, {plan.local_parameters:,} on rank 0 ({share:.3f} of an even share)",
        f"a rank holds about {gib(plan.total)}:",
        *_parts(plan.held),
    ]
    if plan.host:
        found += [
            f"and {gib(sum(plan.host.values()))} in the machine's memory, by parallel.offload:",
            *_parts(plan.host),
        ]
    if plan.sent:
        found += [f"and sends at most {gib(sum(plan.sent.values()))} for an optimizer step:", *_parts(plan.sent)]
    if memory is not None:
        fits = plan.total <= memory
        size = f"{memory / 2**30:.4g} GiB" if memory >= 2**30 else gib(memory)
        found.append(f"fits {size}" if fits else f"does not fit {size}; {advice(plan)}")
    return found


def parts(plan: RankPlan) -> str:
    """Returns one line with the memory of a rank, in all and by component."""
    each = ", ".join(f"{name} {gib(count)}" for name, count in plan.held.items())
    return f"{gib(plan.total)} ({each})" + ("" if plan.world == 1 else f" on each of {plan.world} ranks")


def advice(plan: RankPlan) -> str:
    """Returns one line with the settings that reduce a rank's memory."""
    return f"what helps, the cheapest first: {'; '.join(plan.remedies)}"


def _parts(parts: dict[str, int]) -> list[str]:
    return [f"  {name:<24} {gib(count):>10}" for name, count in parts.items()]
