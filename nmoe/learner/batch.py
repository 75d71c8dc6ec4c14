"""A packed training batch: sequences end to end, every column aligned with the position that does the predicting.

A sequence of tokens `x[0..n]` has n predicting positions: position t reads `x[t]` and predicts `x[t + 1]`. The last token is
never read, so it is never run through the model.
"""

# Shapes: T predicting positions over all sequences, B sequences, N scored positions, M largest kept set, Y layers, K experts.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Example: one sequence [5, 6, 7, 2] whose prompt is [5, 6] has `inputs_T = [5, 6, 7]`, `targets_T = [6, 7, 2]`,
    `scored_T = [False, True, True]`, and under a token mean `weights_T = [0, 1/2, 1/2]`.

    `weights_T` holds mask, reduction and global denominator in one: an objective returns a weighted sum, so that a batch
    splits into micro-batches or ranks without changing its gradient.
    """

    lengths: tuple[int, ...]
    inputs_T: Tensor
    targets_T: Tensor
    scored_T: Tensor
    weights_T: Tensor
    advantages_T: Tensor | None = None
    behaviour_logprobs_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None
    routes_TYK: Tensor | None = None
    kept_TM: Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.inputs_T.shape[0])

    def positions(self) -> Tensor:
        """Position within its own sequence of each token, `[T]`."""
        lengths_B = torch.tensor(self.lengths, dtype=torch.int64)
        starts_T = torch.repeat_interleave(lengths_B.cumsum(0) - lengths_B, lengths_B)
        return torch.arange(self.tokens) - starts_T

    def without_routes(self) -> Batch:
        """The batch for a model that picks its own experts: recorded routes belong to the policy that sampled."""
        return replace(self, routes_TYK=None)

    def with_reference(self, logprobs_N: Tensor) -> Batch:
        """The batch with a reference policy's log-probabilities of its scored tokens."""
        column_T = torch.zeros_like(self.weights_T).masked_scatter(self.scored_T, logprobs_N)
        return replace(self, reference_logprobs_T=column_T)

    def to(self, device: torch.device) -> Batch:
        columns: dict[str, Any] = {name: values_T.to(device) for name, values_T in self._columns()}
        return replace(self, **columns)

    def _columns(self) -> Iterator[tuple[str, Tensor]]:
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), Tensor):
                yield f.name, value

    def select(self, sequences: Sequence[int]) -> tuple[Batch, Tensor]:
        """The batch of these sequences, in this order, and where its positions stood in this one (`[T']`)."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        rows_T = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in sequences])
        columns = {name: values_T[rows_T] for name, values_T in self._columns()}
        lengths = tuple(self.lengths[i] for i in sequences)
        return replace(self, lengths=lengths, **columns), rows_T


def micro_batches(lengths: Sequence[int], tokens_per_microbatch: int) -> Iterator[list[int]]:
    """Sequence indices, longest first, cut where the next would exceed the token budget; a longer one stands alone.

    Sorting puts sequences of similar length together, which is what the length buckets of attention want.
    """
    chosen: list[int] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if chosen and tokens + lengths[i] > tokens_per_microbatch:
            yield chosen
            chosen, tokens = [], 0
        chosen.append(i)
        tokens += lengths[i]
    if chosen:
        yield chosen
