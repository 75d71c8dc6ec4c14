"""Checks that training on several ranks equals training in a single process, for all parallel dimensions and expert formats."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe.config.tables.model import ExpertProfile, OptimizerSection, ParallelSection
from nmoe.errors import ShortfallError
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy, total, value_loss
from nmoe.model.head import Head
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.transformer import Transformer
from nmoe.parallel.ranks import Ranks
from nmoe.rank_checks.twins import EXPERTS, FAMILIES, OneProcess, Twins, batch_of, model_of, with_routes

EXACT = 1e-9
"""The largest relative difference in fp64, where ranks and a single process differ only in the order of sums."""
ROUNDED = 1e-5
"""The largest relative difference of gradients if fp32 values are summed in another order.

There is no such bound for weights, because AdamW divides by gradients, which may be tiny.
"""
SETTINGS = OptimizerSection(learning_rate=1e-2, warmup_steps=2, max_grad_norm=0.5, weight_decay=0.1)
STEPS = 10


def all_axes(world: int, experts: int = EXPERTS) -> list[ParallelSection]:
    """Returns all ways to divide a model over `world` ranks: each number of replicas with each size of an expert group."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    return [
        ParallelSection(dp_replicate=replicas, ep=ep)
        for replicas in divisors
        for ep in divisors
        if (world // replicas) % ep == 0 and experts % ep == 0
    ]


def some_axes(brief: bool) -> list[ParallelSection]:
    """Returns all ways to divide a model over the ranks; if `brief`, at most two, which have expert groups if possible."""
    axes = all_axes(dist.get_world_size())
    return [one for one in axes if one.ep != 1][-2:] or axes if brief else axes


def batches(brief: bool, count: int = STEPS) -> list[Batch]:
    """Makes batches with two micro-batches per rank, or one if `brief`; the first batch has fewer sequences than there
    are ranks."""
    few, sequences = batch_of((9,), 0), _sequences(brief)
    return [few, *(batch_of(tuple(12 - (step + i) % 5 for i in range(sequences)), step) for step in range(1, count))]


def _sequences(brief: bool) -> int:
    return dist.get_world_size() * (1 if brief else 2)


def learner_of(model: Transformer, ranks: Ranks, **more: Any) -> Learner:
    """Makes a learner of the model with one sequence per micro-batch, so that fp32 values are rounded equally on any
    number of ranks."""
    return Learner(model, SETTINGS, STEPS, 1, ranks=ranks, **more)


def along(
    axes: Iterable[ParallelSection], make: Callable[[Ranks], Learner], what: str, bound: float = EXACT
) -> Iterator[Twins]:
    """Yields, for each way to divide a model, a comparison of the learner on all ranks with the learner in a single process.

    The single process computes its results only once. `what` describes the comparison in error messages.
    """
    alone = OneProcess(lambda: make(Ranks.alone()))
    for parallel in axes:
        shown = f"{what}, dp_replicate {parallel.dp_replicate}, ep {parallel.ep}"
        yield Twins(make(Ranks(parallel)), alone.rewound(), bound, shown)


def check_families(brief: bool) -> str:
    """Checks gradients, clipped AdamW steps and metrics of five model families in fp64, with all parallel dimensions.

    If `brief`, each family has only some of the dimensions.
    """
    world, worst, pairs, steps = dist.get_world_size(), 0.0, 0, 2 if brief else STEPS
    for number, family in enumerate(FAMILIES):
        axes = all_axes(world) if family != "dense" else all_axes(world, 1)
        some = axes[number % 4 :: 4] or axes[-1:] if brief else axes
        for pair in along(some, lambda ranks, family=family: learner_of(model_of(family), ranks), family):  # type: ignore[misc]
            pair.train(batches(brief, steps), cross_entropy)
            worst, pairs = max(worst, pair.worst()), pairs + 1
    return f"{pairs} pairs of family and axes, {steps} steps each, off by at most {worst:.0e}"


def check_single_precision(brief: bool) -> str:
    """Checks that gradients in fp32 differ from a single process's only by rounding, if batches are split differently.

    There are three cases: balanced experts; all tokens on the experts of one rank, so that other ranks get no rows; and
    the latter with an adapter.
    """
    world, worst = dist.get_world_size(), 0.0
    batch = batch_of(tuple(9 + i % 7 for i in range(3 * world)), 1)
    for kind in ("even", "crowded", "crowded adapter"):

        def make(ranks: Ranks, kind: str = kind) -> Learner:
            model = model_of("qwen3_moe", torch.float32)
            model = model if kind == "even" else _crowded(model)
            lora = _adapter(model) if kind == "crowded adapter" else None
            return Learner(model, SETTINGS, STEPS, 4096, ranks=ranks, lora=lora)

        for pair in along(some_axes(brief), make, f"fp32, {kind}", ROUNDED):
            pair.ours.forward_backward(batch, cross_entropy).result()
            pair.alone.result("a loss", lambda learner: learner.forward_backward(batch, cross_entropy).result().loss)
            pair.all_gradients()
            worst = max(worst, pair.worst())
    return f"gradients off by at most {worst:.0e} of their norm"


def _crowded(model: Transformer) -> Transformer:
    """Changes the model so that every token goes to the last two experts, and returns it."""
    for moe in model.moe_layers():
        moe.router.bias[-2:] = 100.0
    return model


def check_balance(brief: bool) -> str:
    """Checks that router biases and the auxiliary loss are computed over the whole batch, and that recorded routes save
    a forward pass."""
    worst = 0.0
    for replayed in (False, True):
        for pair in along(some_axes(brief), lambda ranks: learner_of(_balanced(), ranks), "balance"):
            one = batch_of(tuple(7 + i % 4 for i in range(_sequences(brief))), 3)
            batch = with_routes(one, pair.ours.model, 4) if replayed else one
            runs = 0

            def count(*_: object) -> None:
                nonlocal runs
                runs += 1

            hook = pair.ours.model.register_forward_pre_hook(count)
            result = pair.forward_backward(batch, cross_entropy)
            hook.remove()
            each = _sequences(brief) // dist.get_world_size()
            pair.equal("forward passes", runs, each if replayed else 2 * each)
            if not result.auxiliary_loss > 0:
                raise ShortfallError(f"the auxiliary loss is {result.auxiliary_loss}")
            pair.gradients()
            pair.step()
            pair.weights()
            worst = max(worst, pair.worst())
    return f"off by at most {worst:.0e}"


def _balanced() -> Transformer:
    model = model_of("deepseek_v3")
    model.config = model.config.model_copy(update={"router_aux_loss_coef": 0.5, "router_bias_rate": 0.01})
    return model


def check_hybrid(brief: bool) -> str:
    """Checks expert groups over several nodes, whose rows travel in two hops. On a single node, half of the ranks act
    as one node."""
    world, ep = dist.get_world_size(), max(one.ep for one in all_axes(dist.get_world_size()) if isinstance(one.ep, int))
    if ep == 1:
        return "one rank: no nodes"
    parallel = ParallelSection(dp_replicate=world // ep, ep=ep, rdep="hybrid")
    kept = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(max(ep // 2, 1))
    try:
        (pair,) = along([parallel], lambda ranks: learner_of(model_of("qwen3_moe"), ranks), "hybrid")
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        if kept is not None:
            os.environ["LOCAL_WORLD_SIZE"] = kept
    pair.train(batches(brief, 3 if brief else STEPS), cross_entropy)
    axes = pair.ours.ranks.axes
    assert axes is not None, "the learner sharded its model"
    return f"ep {axes.ep} over {axes.nodes} nodes, off by at most {pair.worst():.0e}"


def check_splits(brief: bool) -> str:
    """Checks micro-batches of several sequences with common prefixes, whose numbers the ranks do not divide.

    The parts of the model that stay in fp32 are then summed in another order.
    """
    world, worst = dist.get_world_size(), 0.0
    lengths = (5, 12, 3, 20, 9, 1, 12, 30, 4)
    for family in ("gpt_oss",) if brief else FAMILIES:
        make = lambda ranks, family=family: Learner(model_of(family), SETTINGS, STEPS, 25, ranks=ranks)  # noqa: E731
        (pair,) = along([ParallelSection()], make, "splits", ROUNDED)
        for batch in (
            _shared(batch_of(lengths, 1)),
            _shared(batch_of(lengths[:3], 2)),
            _shared(batch_of(lengths * min(world, 3), 3)),
        ):
            pair.both("log-probabilities", logprobs(batch))
            pair.forward_backward(batch, cross_entropy)
            pair.gradients()
        worst = max(worst, pair.worst())
    return f"off by at most {worst:.0e}"


def logprobs(batch: Batch) -> Callable[[Learner], Tensor]:
    """Returns a function that computes a learner's log-probabilities of the batch."""
    return lambda learner: learner.logprobs(batch).result()


def _shared(batch: Batch) -> Batch:
    """Changes the batch so that its last sequence has the same prefix as its first, and marks the prefix as shared."""
    batch.inputs_T[-batch.lengths[-1] :][:2] = batch.inputs_T[:2]
    last = len(batch.lengths) - 1
    return replace(batch, prefixes=tuple((0 if i == last else i, 2) for i in range(last + 1)))


def check_one_expert(brief: bool) -> str:
    """Checks a batch whose tokens all go to the same two experts: no token is lost, and other experts get no gradient."""
    world, worst = dist.get_world_size(), 0.0

    for pair in along(some_axes(brief), lambda ranks: learner_of(_crowded(model_of("gpt_oss")), ranks), "one expert"):
        batch = batch_of(tuple(5 + i for i in range(world)), 5)
        result = pair.forward_backward(batch, cross_entropy)
        assert result.routing is not None
        pair.equal("load", result.routing.load_YE.sum(0).tolist(), [0] * (EXPERTS - 2) + [2 * batch.tokens] * 2)
        pair.gradients()
        pair.step()
        pair.weights()
        worst = max(worst, pair.worst())
    return f"off by at most {worst:.0e}"


def check_adapters(brief: bool) -> str:
    """Checks a LoRA adapter at attention and experts: training, saving, resuming, and export merged into the base model."""
    worst = 0.0

    def make(ranks: Ranks) -> Learner:
        model = model_of("qwen3_moe")
        return learner_of(model, ranks, lora=_adapter(model))

    axes = some_axes(brief)
    for pair in along(axes, make, "lora"):
        pair.train(batches(brief, 3), cross_entropy)
        worst = max(worst, pair.worst())
    with shared_directory() as directory:
        export_both(pair, directory)
        pair.ours.save(directory)
        resumed = Twins(make(Ranks(axes[-1])), pair.alone, EXACT, "resumed lora")
        resumed.ours.load(directory)
        resumed.train(batches(brief, 2), cross_entropy)
    return f"off by at most {max(worst, resumed.worst()):.0e}"


def _adapter(model: Transformer) -> Lora:
    targets = ("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")
    lora = Lora(model, LoraSettings(4, 8.0), choose(model, targets), "base", "0" * 64).initialize(0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return lora


def export_both(pair: Twins, directory: Path) -> None:
    """Exports the models of both learners, and compares the files; `directory` is shared by all ranks."""
    from safetensors.torch import load_file

    def values(path: Path) -> dict[str, tuple[str, Tensor]]:
        # In fp64, as tensors in fp8 cannot be sent.
        return {name: (str(one.dtype), one.double()) for name, one in load_file(path / "model.safetensors").items()}

    def alone(learner: Learner) -> dict[str, tuple[str, Tensor]]:
        with tempfile.TemporaryDirectory() as temporary:
            learner.export(Path(temporary) / "exported")
            return values(Path(temporary) / "exported")

    pair.ours.export(directory / "exported")
    dist.barrier()  # rank 0 writes
    mine, other = values(directory / "exported"), pair.alone.result("exported files", alone)
    pair.equal("the exported tensors", *({name: dtype for name, (dtype, _) in one.items()} for one in (mine, other)))
    pair.near(*((f"the exported {name}", mine[name][1], other[name][1]) for name in sorted(mine)))


def check_heads(brief: bool) -> str:
    """Checks a policy with a critic's head, and a separate critic model without logits over the vocabulary."""
    worst = 0.0
    for head_only in (False, True):
        objective = value_loss() if head_only else total(cross_entropy, value_loss())

        def make(ranks: Ranks, head_only: bool = head_only) -> Learner:
            model = model_of("qwen3_moe")
            head = Head(model.config.hidden_size, 1, "value").double()
            torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
            return learner_of(model, ranks, head=head, head_only=head_only, head_learning_rate=3e-2)

        for pair in along(some_axes(brief), make, "critic" if head_only else "policy with a head"):
            pair.train(batches(brief, 3), objective)
            batch = batch_of((6, 5, 9), 8)
            pair.both("head outputs", lambda learner, batch=batch: learner.head_outputs(batch).result())  # type: ignore[misc]
            worst = max(worst, pair.worst())
    return f"off by at most {worst:.0e}"


def check_checkpoints(brief: bool) -> str:
    """Checks that a checkpoint can be resumed with other parallel dimensions and in a single process, with equal
    metrics afterwards."""
    worst = 0.0
    steps = batches(brief, 4)
    axes = some_axes(brief)
    make = lambda ranks: learner_of(model_of("gpt_oss"), ranks)  # noqa: E731
    after: OneProcess | None = None
    with shared_directory() as directory:
        for number, pair in enumerate(along(axes, make, "checkpoint")):
            saved = directory / str(number)
            saved.mkdir(exist_ok=True)
            pair.train(steps[:2], cross_entropy)
            pair.ours.save(saved)
            after = after or OneProcess(lambda alone=pair.alone: _copied(alone.learner()))  # type: ignore[misc]
            for other in (Ranks(axes[number - 1]), Ranks.alone()):
                resumed = learner_of(_emptied(model_of("gpt_oss")), other)
                resumed.load(saved)
                again = Twins(resumed, after.rewound(), EXACT, f"resumed from ep {axes[number].ep}")
                again.train(steps[2:], cross_entropy)
                worst = max(worst, again.worst())
    return f"{2 * len(axes)} resumptions, off by at most {worst:.0e}"


def _emptied(model: Transformer) -> Transformer:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return model


def _copied(learner: Learner) -> Learner:
    """Returns a copy of a learner and its optimizer in this process."""
    copy = learner_of(model_of("gpt_oss"), Ranks.alone())
    with tempfile.TemporaryDirectory() as directory:
        learner.save(Path(directory))
        copy.load(Path(directory))
    return copy


@contextmanager
def shared_directory() -> Iterator[Path]:
    """Yields a temporary directory that all ranks share."""
    name: list[Any] = [tempfile.mkdtemp(prefix="nmoe-checks-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    try:
        yield Path(name[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(name[0])


def check_profiles(brief: bool) -> str:
    """Checks experts in each number format (fp8, nvfp4, bf16): training, resuming, and export of the same bytes.

    Weights that are gathered for a pass have to be quantised anew each time, because after a step the same memory has
    other values.
    """
    world, worst = dist.get_world_size(), 0.0
    steps = batches(brief, 4)
    axes = [all_axes(world)[0], some_axes(True)[-1]] if brief else all_axes(world)
    profiles: list[ExpertProfile] = ["fp8", "nvfp4"] if brief else ["fp8", "nvfp4", "bf16"]
    pairs = 0
    for profile in profiles:

        def make(ranks: Ranks, profile: ExpertProfile = profile) -> Learner:
            # NVFP4 has blocks of 16.
            return learner_of(model_of("qwen3_moe", expert_profile=profile, expert_width=16), ranks)

        # In brief NVFP4 is left out where experts are not divided.
        some = axes[1:] if brief and profile == "nvfp4" else axes
        for parallel, pair in zip(some, along(some, make, profile), strict=True):
            pair.train(steps[:3], cross_entropy)
            pair.both("log-probabilities", logprobs(batch_of((6, 5, 9), 8)))
            with shared_directory() as directory:
                export_both(pair, directory)
                (directory / "saved").mkdir(exist_ok=True)
                pair.ours.save(directory / "saved")
                resumed = Twins(make(Ranks(parallel)), pair.alone, EXACT, f"resumed {profile}")
                resumed.ours.load(directory / "saved")
                resumed.train(steps[3:], cross_entropy)
            worst, pairs = max(worst, pair.worst(), resumed.worst()), pairs + 1
    return f"{pairs} pairs of axes and profile, off by at most {worst:.0e}"
