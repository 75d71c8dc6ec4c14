"""What a run needs on each of N ranks, before anybody pays for a machine: `nmoe plan`.

The model is sharded on meta tensors by the code that trains, over torch's fake process group of N ranks. What ranks hold is then
counted; activations are estimated as in `nmoe preflight`, and what ranks send follows from what FSDP2 and expert groups do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nmoe.config.commands.base import RunConfig
from nmoe.config.commands.rl import RLConfig
from nmoe.config.commands.selfplay import SelfplayConfig
from nmoe.config.commands.supervised import PretrainConfig, RecordsConfig, VerifierConfig
from nmoe.model.transformer import Transformer
from nmoe.parallel.axes import Axes
from nmoe.parallel.ranks import Ranks
from nmoe.preflight.memory import activation_numbers, estimate
from nmoe.preflight.size import Size, size_of

_FLOAT = 4


@dataclass(frozen=True)
class RankPlan:
    """What rank 0 holds and sends, in bytes by part; no rank has more than the unevenness of the first axis.

    `held` is during training, with what FSDP gathers; `sent` is of one optimizer step. `remedies` say what would make it smaller,
    the cheapest first.
    """

    axes: Axes
    world: int
    parameters: int
    local_parameters: int
    held: dict[str, int]
    sent: dict[str, int]
    remedies: list[str]

    @property
    def total(self) -> int:
        return sum(self.held.values())


@contextmanager
def fake_ranks(world: int, per_node: int) -> Iterator[None]:
    """For the block this process is rank 0 of `world` ranks that are not there: collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = os.environ.get("LOCAL_WORLD_SIZE")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


def plan(config: RunConfig, world: int, per_node: int) -> RankPlan:
    """Raises UserError where the axes of [parallel] do not fit, a checkpoint is missing, or the machine lacks the device."""
    size = size_of(config)
    with torch.device("meta"):
        model = Transformer(size.shape)
    if world == 1:
        ranks = Ranks(config.parallel)
        ranks.shard(model, model.blocks, model.moe_layers(), size.shape.routed_experts)
        return _counted(config, size, model, ranks, world)
    with fake_ranks(world, per_node):
        ranks = Ranks(config.parallel)
        ranks.shard(model, model.blocks, model.moe_layers(), size.shape.routed_experts)
        return _counted(config, size, model, ranks, world)


def local(parameter: torch.Tensor) -> int:
    """Numbers of a parameter that this rank holds."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _counted(config: RunConfig, size: Size, model: Transformer, ranks: Ranks, world: int) -> RankPlan:
    axes = ranks.axes
    assert axes is not None, "the model was sharded"
    width = size.dtype.itemsize
    here = sum(map(local, model.parameters()))
    # An adapter and a head are not sharded.
    trained = size.trained if size.adapts else here
    held = {
        "weights": here * width + (size.trained * width if size.adapts else 0),
        "gradients": trained * _FLOAT,
        "optimizer": trained * _FLOAT * (2 if size.dtype == torch.float32 else 3),
        "activations": config.batch.tokens_per_microbatch
        * activation_numbers(size.shape, config.model.checkpoint_activations)
        * width,
    }
    blocks = sorted((_gathered(block, axes) for block in model.blocks), reverse=True)
    outside = _gathered(model, axes) - sum(blocks)
    if world > 1:
        # The block that runs and the one that is fetched meanwhile; the gradient of one before ranks have shared it out.
        held["gathered blocks"] = (sum(blocks[:2]) + outside) * width
        held["gradient of a block"] = 0 if size.adapts else max(blocks[0], outside) * _FLOAT
    whole = estimate(config, size)
    for name in ("other models", "key-value cache"):
        if name in whole:
            held[name] = whole[name]
    if world > 1 and isinstance(config, RLConfig | SelfplayConfig):
        held["whole weights to sample"] = size.parameters * width
    held = {name: count for name, count in held.items() if count}
    return RankPlan(
        axes, world, size.parameters, here, held, _sent(config, size, model, axes, world), _remedies(config, size, axes)
    )


def _gathered(module: nn.Module, axes: Axes) -> int:
    """Numbers of a module's weights once they are gathered: experts stay apart along ep."""
    return sum(_of_shards(parameter, axes) for parameter in module.parameters())


def _of_shards(parameter: torch.Tensor, axes: Axes) -> int:
    """Numbers of a parameter that the ranks which gather it together hold."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    return parameter.numel() // (axes.ep if _is_expert(parameter) else 1)


def _is_expert(parameter: DTensor) -> bool:
    return "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _sent(config: RunConfig, size: Size, model: Transformer, axes: Axes, world: int) -> dict[str, int]:
    """Bytes that a rank sends for one optimizer step, at the most tokens that a step can have. A ring sends (n - 1) / n of what it
    gathers or scatters, and twice as much of what it sums."""
    if world == 1:
        return {}
    width, tokens = size.dtype.itemsize, math.ceil(tokens_of_step(config) / world)
    passes = max(1, math.ceil(tokens / config.batch.tokens_per_microbatch))
    gathers = 3 if config.model.checkpoint_activations else 2

    def ring(n: int) -> float:
        return (n - 1) / n

    gather = scatter = replicas = 0.0
    for parameter in model.parameters():
        n = axes.efsdp if isinstance(parameter, DTensor) and _is_expert(parameter) else axes.dp_shard
        together = _of_shards(parameter, axes)
        gather += together * ring(n) * width * min(gathers, 2)
        if not size.adapts:
            scatter += together * ring(n) * _FLOAT
            replicas += 2 * local(parameter) * ring(axes.dp_replicate) * _FLOAT
    shape = size.shape
    rows = tokens * shape.experts_per_token * len(shape.moe_layers)
    sent = {
        "gathered weights": int(gather * passes),
        "scattered gradients": int(scatter * passes),
        "sums over replicas": int(replicas * passes),
        # To the experts and back, forward and backward, and forward again where activations are recomputed.
        "rows to experts": int(rows * shape.hidden_size * width * 2 * gathers * ring(axes.ep)),
    }
    if isinstance(config, RLConfig | SelfplayConfig):
        sent["weights to sample"] = int(size.parameters * width * ring(axes.dp_shard))
    return {name: count for name, count in sent.items() if count}


def tokens_of_step(config: RunConfig) -> int:
    """The most tokens that one optimizer step is of; of samples without their prompts."""
    if isinstance(config, PretrainConfig):
        return config.data.tokens_per_step
    if isinstance(config, VerifierConfig):
        return config.verifier.tokens_per_step
    if isinstance(config, RecordsConfig):
        return config.records.tokens_per_step
    assert isinstance(config, RLConfig | SelfplayConfig), "every other run samples"
    samples = config.batch.prompts_per_step * config.batch.group_size
    updates = config.batch.updates_per_step if isinstance(config, RLConfig) else 1
    return samples * config.sampling.max_new_tokens // updates


def _remedies(config: RunConfig, size: Size, axes: Axes) -> list[str]:
    """What makes a rank's part smaller, in the order of what it costs."""
    found = []
    if size.dtype == torch.float32 and size.device.type == "cuda":
        found.append('model.precision = "bfloat16"')
    if not config.model.checkpoint_activations:
        found.append("model.checkpoint_activations = true")
    found.append(f"batch.tokens_per_microbatch below {config.batch.tokens_per_microbatch:,}")
    if axes.dp_replicate > 1:
        found.append(f"parallel.dp_replicate below {axes.dp_replicate}")
    found.append("more ranks")
    if not size.adapts:
        found.append("an adapter, by [lora]")
    return found
