"""A learner on all ranks beside one in a single process: what they compute has to be the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nmoe.errors import ShortfallError
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner, PassResult
from nmoe.learner.objectives import Objective
from nmoe.parallel.ranks import whole

# What is smaller is compared as if it had this norm: a difference of values that are zero but for rounding means nothing.
_SMALL = 1e-3


class Twins:
    """Compares two learners that make the same calls. `worst` is the largest relative difference met so far, and `where` its name;
    above `bound` a comparison raises ShortfallError."""

    def __init__(self, ours: Learner, alone: Learner, bound: float, what: str) -> None:
        self.ours, self.alone, self.bound, self.what = ours, alone, bound, what
        self.worst, self.where = 0.0, "nothing"

    def near(self, name: str, mine: Tensor, other: Tensor) -> None:
        """Compares two tensors by the norm of their difference, relative to that of `other`."""
        mine, other = whole(mine.detach()).double(), other.detach().double()
        if mine.shape != other.shape:
            raise ShortfallError(f"{self.what}: {name} is {list(mine.shape)}, and {list(other.shape)} in one process")
        difference = float((mine - other).norm() / other.norm().clamp(min=_SMALL)) if mine.numel() else 0.0
        if difference > self.worst or difference != difference:
            self.worst, self.where = difference, name
        if not difference <= self.bound:
            raise ShortfallError(
                f"{self.what}: {name} is off by {difference:.1e} from one process, more than {self.bound:.0e}"
            )

    def equal(self, name: str, mine: object, other: object) -> None:
        if mine != other:
            raise ShortfallError(f"{self.what}: {name} is {mine}, and {other} in one process")

    def forward_backward(self, batch: Batch, objective: Objective) -> PassResult:
        """Compares losses, statistics by token and the routers' figures."""
        mine = self.ours.forward_backward(batch, objective).result()
        other = self.alone.forward_backward(batch, objective).result()
        for name, values in (("loss", "loss"), ("auxiliary loss", "auxiliary_loss")):
            self.near(name, *(torch.tensor(getattr(result, values)) for result in (mine, other)))
        self.equal("the set of statistics", sorted(mine.tokens), sorted(other.tokens))
        for name in sorted(mine.tokens):
            self.near(name, mine.tokens[name], other.tokens[name])
        if mine.routing is not None and other.routing is not None:
            self.equal("expert load", mine.routing.load_YE.tolist(), other.routing.load_YE.tolist())
            self.equal("route picks", mine.routing.picks, other.routing.picks)
            self.near("router entropy", mine.routing.entropy_sum_Y, other.routing.entropy_sum_Y)
        return mine

    def gradients(self) -> None:
        """Compares the gradients so far, summed over ranks."""
        mine, others = self.ours.optimizer.parameters, self.alone.optimizer.parameters
        for name, own, other in zip(self.alone.optimizer.names, mine, others, strict=True):
            gradient = self._summed(own)
            if other.grad is not None:
                self.near(f"the gradient of {name}", gradient, other.grad)
            else:
                self.equal(f"whether {name} has a gradient", bool(gradient.any()), False)

    def all_gradients(self) -> None:
        """Compares all gradients so far as one vector."""
        mine, others = self.ours.optimizer.parameters, self.alone.optimizer.parameters
        own = torch.cat([self._summed(parameter).double().flatten() for parameter in mine])
        other = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in others]
        self.near("the gradient", own, torch.cat([gradient.double().flatten() for gradient in other]))

    def _summed(self, parameter: Tensor) -> Tensor:
        """FSDP sums the gradients of sharded parameters; an optimizer step those of the others."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return whole(gradient) if isinstance(gradient, DTensor) else self.ours.ranks.sum(gradient.clone())

    def step(self) -> None:
        """Compares what an optimizer step reports."""
        mine, other = self.ours.optim_step().result(), self.alone.optim_step().result()
        for name, value in other.metrics().items():
            self.near(name, torch.tensor(mine.metrics()[name]), torch.tensor(value))

    def weights(self) -> None:
        """Compares all weights and buffers, the routers' biases among them, and those of a head."""
        pairs: list[tuple[nn.Module, nn.Module]] = [(self.ours.model, self.alone.model)]
        if self.ours.head is not None and self.alone.head is not None:
            pairs.append((self.ours.head, self.alone.head))
        for own, others in pairs:
            theirs = others.state_dict()
            for name, tensor in own.state_dict().items():
                self.near(name, tensor, theirs[name])

    def train(self, batches: Iterable[Batch], objective: Objective) -> None:
        """Steps on each batch, with gradients compared at the first and weights at the end."""
        for number, batch in enumerate(batches):
            self.forward_backward(batch, objective)
            if number == 0:
                self.gradients()
            self.step()
        self.weights()
