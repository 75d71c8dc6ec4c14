"""Compares a learner on several ranks with one in a single process; contains the small models that both train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nmoe.errors import ShortfallError
from nmoe.learner.batch import Batch, token_weights
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Objective
from nmoe.learner.passes import PassResult
from nmoe.model.config import DeltaNet, LatentAttention, ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.parallel.ranks import is_sharded, like, local, sharded_as, total_norm

VOCABULARY = 48
EXPERTS = 24
"""The number of experts, which 2, 3, 4, 6 and 8 divide."""

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "context_tokens": 64,
    "tie_embeddings": False,
}
_MOE = _BASE | {"experts": EXPERTS, "experts_per_token": 2, "expert_width": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": _BASE | {"intermediate_size": 48, "tie_embeddings": True},
    "qwen3_moe": _MOE,
    "gpt_oss": _MOE
    | {
        "qk_norm": False,
        "qkv_bias": True,
        "output_bias": True,
        "sinks": True,
        "windows": (8, 0),
        "expert_bias": True,
        "swiglu_limit": 1.5,
        "router_linear_bias": True,
    },
    "deepseek_v3": _MOE
    | {
        "kv_heads": 4,
        "head_dim": 20,
        "latent": LatentAttention(q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, value_dim=8),
        "qk_norm": False,
        "intermediate_size": 48,
        "dense_layers": (0,),
        "experts_per_token": 3,
        "shared_experts": 2,
        "router_scores": "sigmoid",
        "router_groups": 4,
        "router_groups_kept": 2,
        "router_scale": 2.5,
    },
    "qwen3_next": _MOE
    | {
        "head_dim": 16,
        "rotary_dim": 4,
        "attention_gate": True,
        "norm_offset": True,
        "tie_embeddings": True,
        "norm_eps": 1e-2,
        "shared_experts": 1,
        "shared_gate": True,
        "recurrent_layers": (0,),
        "delta": DeltaNet(key_heads=2, value_heads=4, key_dim=12, value_dim=10, conv_tokens=4),
    },
}


def model_of(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """Makes a small model of a family, with the same weights on every rank.

    In fp64 it has exact numerics: the values of a row do not depend on other rows.
    """
    model = Transformer(ModelConfig(**(FAMILIES[family] | changes))).initialize(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.embedding.weight.mul_(25)  # as large as what the blocks add to it
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.double().set_numerics("exact") if dtype == torch.float64 else model.to(dtype)


def batch_of(lengths: tuple[int, ...], seed: int) -> Batch:
    """Makes a batch of random tokens with random returns; the loss covers the last two thirds of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    inputs_T, targets_T = torch.randint(VOCABULARY, (2, tokens), generator=generator)
    scored_T = torch.cat([torch.arange(length) >= length // 3 for length in lengths])
    weights_T = token_weights("sequence", scored_T, lengths)
    returns_T = torch.randn(tokens, generator=generator)
    return Batch(lengths, inputs_T, targets_T, scored_T, weights_T, returns_T=returns_T)


def with_routes(batch: Batch, model: Transformer, seed: int) -> Batch:
    """Returns the batch with random expert choices as its recorded routes."""
    config = model.config
    shape = (batch.tokens, len(config.moe_layers), config.experts)
    order = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return replace(batch, routes_TYK=order[..., : config.experts_per_token].to(torch.int16))


T = TypeVar("T")

# Smaller tensors are compared as if they had this norm: differences of values that are zero but for rounding mean nothing.
_SMALL = 1e-3


class OneProcess:
    """A learner in rank 0 alone, whose results are computed once and broadcast; after `rewound` they are repeated."""

    def __init__(self, make: Callable[[], Learner]) -> None:
        self._make = make
        self._learner: Learner | None = None
        self._results: list[tuple[str, Any]] = []
        self._next = 0

    def result(self, name: str, compute: Callable[[Learner], T]) -> T:
        """Returns the result of `compute` on the learner, on all ranks, which have to call this together. Do not modify
        the result."""
        if self._next == len(self._results):
            # Rank 0 keeps a copy: its gradients and weights change.
            found: list[Any] = [copy.deepcopy(compute(self.learner())) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(found)
            self._results.append((name, found[0]))
        before, result = self._results[self._next]
        if name != before:
            raise ValueError(f"asked for {name}, where {before} was asked for the first time")
        self._next += 1
        return cast(T, result)

    def rewound(self) -> OneProcess:
        """Returns this object, reset such that the same calls return the same results again, without computing them."""
        self._next = 0
        return self

    def learner(self) -> Learner:
        """Returns the learner, which exists on rank 0 only."""
        if self._learner is None:
            self._learner = self._make()
        return self._learner


class Twins:
    """Calls the same methods on a learner on all ranks (`ours`) and a learner in one process (`alone`), and compares
    the results.

    `bound` is the largest permitted relative difference, and `what` describes the comparison in error messages.
    """

    def __init__(self, ours: Learner, alone: OneProcess, bound: float, what: str) -> None:
        self.ours, self.alone, self.bound, self.what = ours, alone, bound, what
        self._compared: list[tuple[str, Tensor]] = []

    def worst(self) -> float:
        """Returns the largest relative difference so far, on any rank. All ranks have to call this together.

        Raises ShortfallError if a difference exceeds the bound.
        """
        # A NaN counts as infinite. One reduction for all comparisons: ranks that outnumber their cores meet slowly.
        found = torch.stack([torch.where(one.isnan(), torch.inf, one.detach()).cpu() for _, one in self._compared])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        for (name, _), difference in zip(self._compared, found.tolist(), strict=True):
            if not difference <= self.bound:
                raise ShortfallError(
                    f"{self.what}: {name} is off by {difference:.1e} from one process, more than {self.bound:.0e}"
                )
        return max(found.tolist())

    def near(self, *compared: tuple[str, Tensor, Tensor]) -> None:
        """Compares tensors, given as (name, ours, other): the norm of the difference, relative to the norm of the other.

        Each rank compares its part of a sharded tensor, and the largest difference of all ranks counts.
        """
        for name, mine, other in compared:
            if mine.shape != other.shape:
                raise ShortfallError(
                    f"{self.what}: {name} is {list(mine.shape)}, and {list(other.shape)} in one process"
                )
            part, its = _parts(mine, other)
            self._compared.append((name, (part - its).norm() / other.double().norm().clamp(min=_SMALL).to(part.device)))

    def equal(self, name: str, mine: object, other: object) -> None:
        if mine != other:
            raise ShortfallError(f"{self.what}: {name} is {mine}, and {other} in one process")

    def both(self, name: str, compute: Callable[[Learner], Tensor]) -> None:
        """Compares the tensors that a function computes from each learner."""
        self.near((name, compute(self.ours), self.alone.result(name, compute)))

    def forward_backward(self, batch: Batch, objective: Objective) -> PassResult:
        """Runs a forward and backward pass on both learners, and compares losses, statistics per token and routing statistics."""
        mine = self.ours.forward_backward(batch, objective).result()
        other = self.alone.result(
            f"a pass over sequences of {batch.lengths}",
            lambda learner: learner.forward_backward(batch, objective).result(),
        )
        self.equal("the set of statistics", sorted(mine.tokens), sorted(other.tokens))
        losses = [(name, getattr(mine, name), getattr(other, name)) for name in ("loss", "auxiliary_loss")]
        compared = [(name.replace("_", " "), torch.tensor(ours), torch.tensor(its)) for name, ours, its in losses]
        compared += [(name, mine.tokens[name], other.tokens[name]) for name in sorted(mine.tokens)]
        if mine.routing is not None and other.routing is not None:
            self.equal("expert load", mine.routing.load_YE.tolist(), other.routing.load_YE.tolist())
            self.equal("route picks", mine.routing.picks, other.routing.picks)
            compared.append(("router entropy", mine.routing.entropy_sum_Y, other.routing.entropy_sum_Y))
        self.near(*compared)
        return mine

    def gradients(self) -> None:
        """Compares the accumulated gradients of each parameter, summed over the ranks."""
        others, compared = self.alone.result("gradients", _gradients), []
        self.equal("the set of gradients", sorted(self.ours.optimizer.names), sorted(others))
        for name, own in zip(self.ours.optimizer.names, self.ours.optimizer.parameters, strict=True):
            gradient = self._summed(own)
            if (other := others[name]) is not None:
                compared.append((f"the gradient of {name}", gradient, other))
            else:
                self.equal(f"whether {name} has a gradient", bool(local(gradient).any()), False)
        self.near(*compared)

    def all_gradients(self) -> None:
        """Compares all accumulated gradients as one vector."""
        others, differences, squares = self.alone.result("gradients", _gradients), [], []
        for name, own in zip(self.ours.optimizer.names, self.ours.optimizer.parameters, strict=True):
            gradient, other = self._summed(own), others[name]
            part, its = _parts(gradient, torch.zeros(own.shape) if other is None else other)
            differences.append(sharded_as(part - its, gradient))
            squares.append(0.0 if other is None else float(other.double().square().sum()))
        self._compared.append(("the gradient", total_norm(differences) / max(sum(squares) ** 0.5, _SMALL)))

    def _summed(self, parameter: Tensor) -> Tensor:
        """Returns a parameter's gradient, summed over the ranks.

        FSDP has already summed gradients of sharded parameters; other gradients are summed here, as an optimizer step
        would.
        """
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return gradient if is_sharded(gradient) else self.ours.ranks.sum(gradient.clone())

    def step(self) -> None:
        """Takes an optimizer step with both learners, and compares the metrics that it returns."""
        mine = self.ours.optim_step().result().metrics()
        other = self.alone.result("a step", lambda learner: dict(learner.optim_step().result().metrics()))
        self.near(*((name, torch.tensor(mine[name]), torch.tensor(value)) for name, value in other.items()))

    def weights(self) -> None:
        """Compares all weights and buffers, router biases and the head's weights included."""
        others, mine = self.alone.result("weights", _weights), _modules(self.ours)
        self.near(
            *(
                (name, tensor, theirs[name])
                for own, theirs in zip(mine, others, strict=True)
                for name, tensor in own.state_dict().items()
            )
        )

    def train(self, batches: Iterable[Batch], objective: Objective) -> None:
        """Takes a step on each batch with both learners; compares gradients after the first pass and weights at the end."""
        for number, batch in enumerate(batches):
            self.forward_backward(batch, objective)
            if number == 0:
                self.gradients()
            self.step()
        self.weights()


def _parts(mine: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of a tensor, and the same part of the single process's tensor, in fp64."""
    its = local(like(other.detach().to(mine.device), mine))
    return local(mine.detach()).double(), its.double()


def _gradients(learner: Learner) -> dict[str, Tensor | None]:
    optimizer = learner.optimizer
    return {name: one.grad for name, one in zip(optimizer.names, optimizer.parameters, strict=True)}


def _modules(learner: Learner) -> list[nn.Module]:
    return [learner.model] if learner.head is None else [learner.model, learner.head]


def _weights(learner: Learner) -> list[dict[str, Tensor]]:
    return [dict(module.state_dict()) for module in _modules(learner)]
