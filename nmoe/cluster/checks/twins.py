"""A learner on all ranks beside one in a single process: what they compute has to be the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nmoe.errors import ShortfallError
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner, PassResult
from nmoe.learner.objectives import Objective
from nmoe.parallel.ranks import is_sharded, like, local, sharded_as, total_norm

T = TypeVar("T")

# What is smaller is compared as if it had this norm: a difference of values that are zero but for rounding means nothing.
_SMALL = 1e-3


class OneProcess:
    """A learner of rank 0's process alone. It computes once what all ranks are then told, and told again after `rewound`."""

    def __init__(self, make: Callable[[], Learner]) -> None:
        self._make = make
        self._learner: Learner | None = None
        self._told: list[tuple[str, Any]] = []
        self._heard = 0

    def told(self, name: str, compute: Callable[[Learner], T]) -> T:
        """What this function finds of the learner, on all ranks, which all call this. The result is not to be changed."""
        if self._heard == len(self._told):
            # Rank 0 keeps a copy: its gradients and weights change.
            found: list[Any] = [copy.deepcopy(compute(self.learner())) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(found)
            self._told.append((name, found[0]))
        before, result = self._told[self._heard]
        if name != before:
            raise ValueError(f"asked for {name}, where {before} was asked for the first time")
        self._heard += 1
        return cast(T, result)

    def rewound(self) -> OneProcess:
        """The same, from its start: whoever makes the same calls hears the same, which is not computed again."""
        self._heard = 0
        return self

    def learner(self) -> Learner:
        """The learner itself, on rank 0 alone."""
        if self._learner is None:
            self._learner = self._make()
        return self._learner


class Twins:
    """Compares two learners that make the same calls."""

    def __init__(self, ours: Learner, alone: OneProcess, bound: float, what: str) -> None:
        self.ours, self.alone, self.bound, self.what = ours, alone, bound, what
        self._compared: list[tuple[str, Tensor]] = []

    def worst(self) -> float:
        """The largest relative difference met so far, on any rank. All ranks call this together. Raises ShortfallError where one
        is above the bound."""
        # Nothing is larger than what is no number. Once for all comparisons: ranks that outnumber their cores meet slowly.
        found = torch.stack([torch.where(one.isnan(), torch.inf, one.detach()).cpu() for _, one in self._compared])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        for (name, _), difference in zip(self._compared, found.tolist(), strict=True):
            if not difference <= self.bound:
                raise ShortfallError(
                    f"{self.what}: {name} is off by {difference:.1e} from one process, more than {self.bound:.0e}"
                )
        return max(found.tolist())

    def near(self, *compared: tuple[str, Tensor, Tensor]) -> None:
        """Compares tensors, by name `(mine, other)`: the norm of their difference, relative to that of `other`. Each rank compares
        its part of a sharded tensor; the largest difference of all ranks counts."""
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
        """Compares what a function finds of each."""
        self.near((name, compute(self.ours), self.alone.told(name, compute)))

    def forward_backward(self, batch: Batch, objective: Objective) -> PassResult:
        """Compares losses, statistics by token and the routers' figures."""
        mine = self.ours.forward_backward(batch, objective).result()
        other = self.alone.told(
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
        """Compares the gradients so far, summed over ranks."""
        others, compared = self.alone.told("gradients", _gradients), []
        self.equal("the set of gradients", sorted(self.ours.optimizer.names), sorted(others))
        for name, own in zip(self.ours.optimizer.names, self.ours.optimizer.parameters, strict=True):
            gradient = self._summed(own)
            if (other := others[name]) is not None:
                compared.append((f"the gradient of {name}", gradient, other))
            else:
                self.equal(f"whether {name} has a gradient", bool(local(gradient).any()), False)
        self.near(*compared)

    def all_gradients(self) -> None:
        """Compares all gradients so far as one vector."""
        others, differences, squares = self.alone.told("gradients", _gradients), [], []
        for name, own in zip(self.ours.optimizer.names, self.ours.optimizer.parameters, strict=True):
            gradient, other = self._summed(own), others[name]
            part, its = _parts(gradient, torch.zeros(own.shape) if other is None else other)
            differences.append(sharded_as(part - its, gradient))
            squares.append(0.0 if other is None else float(other.double().square().sum()))
        self._compared.append(("the gradient", total_norm(differences) / max(sum(squares) ** 0.5, _SMALL)))

    def _summed(self, parameter: Tensor) -> Tensor:
        """FSDP sums the gradients of sharded parameters; an optimizer step those of the others."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return gradient if is_sharded(gradient) else self.ours.ranks.sum(gradient.clone())

    def step(self) -> None:
        """Compares what an optimizer step reports."""
        mine = self.ours.optim_step().result().metrics()
        other = self.alone.told("a step", lambda learner: dict(learner.optim_step().result().metrics()))
        self.near(*((name, torch.tensor(mine[name]), torch.tensor(value)) for name, value in other.items()))

    def weights(self) -> None:
        """Compares all weights and buffers, the routers' biases among them, and those of a head."""
        others, mine = self.alone.told("weights", _weights), _modules(self.ours)
        self.near(
            *(
                (name, tensor, theirs[name])
                for own, theirs in zip(mine, others, strict=True)
                for name, tensor in own.state_dict().items()
            )
        )

    def train(self, batches: Iterable[Batch], objective: Objective) -> None:
        """Steps on each batch, with gradients compared at the first and weights at the end."""
        for number, batch in enumerate(batches):
            self.forward_backward(batch, objective)
            if number == 0:
                self.gradients()
            self.step()
        self.weights()


def _parts(mine: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of a tensor, and the same part of what one process has of it, in fp64."""
    its = local(like(other.detach().to(mine.device), mine))
    return local(mine.detach()).double(), its.double()


def _gradients(learner: Learner) -> dict[str, Tensor | None]:
    optimizer = learner.optimizer
    return {name: one.grad for name, one in zip(optimizer.names, optimizer.parameters, strict=True)}


def _modules(learner: Learner) -> list[nn.Module]:
    return [learner.model] if learner.head is None else [learner.model, learner.head]


def _weights(learner: Learner) -> list[dict[str, Tensor]]:
    return [dict(module.state_dict()) for module in _modules(learner)]
