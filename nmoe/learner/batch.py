"""A packed training batch: sequences end to end, every column aligned with the position that predicts; and the weights per token.

A sequence of tokens `x[0..n]` has n predicting positions: position t reads `x[t]` and predicts `x[t + 1]`. The last token is
never read, so that it does not run through the model.
"""

# Shapes: T predicting positions over all sequences, n of one sequence, S that run, B sequences, N scored positions, M largest kept
# set, Y layers, K experts.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nmoe.model.device import put

Aggregation = Literal["token", "sequence", "constant"]


def sequence_of(lengths: Sequence[int]) -> Tensor:
    """The number of the sequence that each position belongs to, `[T]`."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


@dataclass(frozen=True)
class Batch:
    """Example: one sequence [5, 6, 7, 2] whose prompt is [5, 6] has `inputs_T = [5, 6, 7]`, `targets_T = [6, 7, 2]`,
    `scored_T = [False, True, True]`, and under a token mean `weights_T = [0, 1/2, 1/2]`.

    `weights_T` holds mask, reduction and global denominator in one: an objective returns a weighted sum, so that a batch
    splits into micro-batches or ranks without changing its gradient.

    `prefixes` may say which sequences begin with the same tokens, as the samples of one prompt do: `((0, 2), (0, 2), (1, 3))` says
    that the first two share their first two inputs. Shared inputs run through the model once, with the same values and gradients as
    if each sequence ran them.

    `pairs` gives for each sequence its pair and whether it is the preferred one: `((0, True), (0, False))`. Both sequences of a
    pair run in one micro-batch, because the loss of a pair is not a sum over its sequences.

    `old_logprobs_T` and `old_values_T` come from the learner before the first of several updates on the same samples. `returns_T`
    and `labels_T` are the targets of a head. Where a head judges steps of several tokens, `steps_T` numbers the step of each judged
    token, and `label_weights_T` is the weight of its step's label, beside the weight of the token in `weights_T`.
    """

    lengths: tuple[int, ...]
    inputs_T: Tensor
    targets_T: Tensor
    scored_T: Tensor
    weights_T: Tensor
    advantages_T: Tensor | None = None
    behaviour_logprobs_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None
    old_logprobs_T: Tensor | None = None
    returns_T: Tensor | None = None
    old_values_T: Tensor | None = None
    labels_T: Tensor | None = None
    label_weights_T: Tensor | None = None
    steps_T: Tensor | None = None
    routes_TYK: Tensor | None = None
    kept_TM: Tensor | None = None
    prefixes: tuple[tuple[int, int], ...] | None = None
    pairs: tuple[tuple[int, bool], ...] | None = None
    samples: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        return int(self.inputs_T.shape[0])

    def positions(self) -> Tensor:
        """Each token's position within its sequence, `[T]`."""
        lengths_B = torch.tensor(self.lengths, dtype=torch.int64)
        starts_T = torch.repeat_interleave(lengths_B.cumsum(0) - lengths_B, lengths_B)
        return torch.arange(self.tokens) - starts_T

    def shared_rows(self) -> tuple[Tensor, Tensor] | None:
        """The rows that have to run, `[S]`, and for every row of the batch the index of its values among them, `[T]`. None if no
        two sequences share a prefix."""
        if self.prefixes is None or len({group for group, _ in self.prefixes}) == len(self.prefixes):
            return None
        first_row: dict[int, int] = {}
        rows, indices = [], []
        start = run = 0
        for length, (group, shared) in zip(self.lengths, self.prefixes, strict=True):
            skipped = shared if group in first_row else 0
            if skipped:
                indices.append(np.arange(first_row[group], first_row[group] + skipped))
            first_row.setdefault(group, run)
            rows.append(np.arange(start + skipped, start + length))
            indices.append(np.arange(run, run + length - skipped))
            start, run = start + length, run + length - skipped
        device = self.inputs_T.device
        return put(np.concatenate(rows), device), put(np.concatenate(indices), device)

    @cached_property
    def scored_positions(self) -> Tensor:
        """The positions that are scored, `[N]`."""
        return self.scored_T.nonzero().flatten()

    def without_routes(self) -> Batch:
        """The batch for another model, which picks its own experts: recorded routes belong to the policy that sampled."""
        return replace(self, routes_TYK=None)

    def with_reference(self, logprobs_N: Tensor) -> Batch:
        """The batch with a reference policy's log-probabilities of its scored tokens."""
        return replace(self, reference_logprobs_T=self.column(logprobs_N))

    def column(self, values_N: Tensor) -> Tensor:
        """Values of the scored tokens as a column of the batch, `[T]`, 0 elsewhere."""
        return torch.zeros(self.tokens, dtype=values_N.dtype).masked_scatter(self.scored_T, values_N)

    def sequence_ids(self) -> Tensor:
        """The number of each token's sequence, `[T]`."""
        return sequence_of(self.lengths)

    def sample_ids(self) -> Tensor:
        """The number of each sequence's sample, `[B]`: its own where a sample is one sequence."""
        return torch.arange(len(self.lengths)) if self.samples is None else torch.tensor(self.samples)

    def sample_lengths(self) -> tuple[int, ...]:
        """The positions of each sample, over all its sequences, which follow one another, `[B]`."""
        if self.samples is None:
            return self.lengths
        found: dict[int, int] = {}
        for sample, length in zip(self.samples, self.lengths, strict=True):
            found[sample] = found.get(sample, 0) + length
        return tuple(found.values())

    def to(self, device: torch.device) -> Batch:
        """The batch on a device, which then need not be asked where the scored positions are."""
        columns: dict[str, Any] = {name: put(values_T, device) for name, values_T in self._columns()}
        there = replace(self, **columns)
        there.__dict__["scored_positions"] = put(self.scored_positions, device)
        return there

    def _columns(self) -> Iterator[tuple[str, Tensor]]:
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), Tensor):
                yield f.name, value

    def select(self, sequences: Sequence[int]) -> tuple[Batch, Tensor]:
        """The batch of these sequences, in this order, and the row of each of its positions in this one, `[T']`."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        rows_T = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in sequences])
        columns = {name: values_T[rows_T] for name, values_T in self._columns()}
        lengths = tuple(self.lengths[i] for i in sequences)
        prefixes = None if self.prefixes is None else tuple(self.prefixes[i] for i in sequences)
        pairs = None if self.pairs is None else tuple(self.pairs[i] for i in sequences)
        samples = None if self.samples is None else tuple(self.samples[i] for i in sequences)
        part = replace(self, lengths=lengths, prefixes=prefixes, pairs=pairs, samples=samples, **columns)
        return part, rows_T

    def beginning(self, positions: int) -> Batch:
        """The first positions of a batch of one sequence."""
        assert len(self.lengths) == 1, "of one sequence"
        columns: dict[str, Any] = {name: values_T[:positions] for name, values_T in self._columns()}
        return replace(self, lengths=(positions,), prefixes=None, **columns)


def micro_batches(batch: Batch, tokens_per_microbatch: int, ranks: int = 1) -> list[list[int]]:
    """Splits a batch into lists of sequence indices within the token budget, longest first; a sequence above the budget stands
    alone. Sequences that share a prefix follow the longest of them, and a pair stays together.

    Sorting puts sequences of similar length together, for the length buckets of attention. Several `ranks` get equally
    many lists of about equally many tokens: the largest list is as small as it can be in this order.
    """
    units = _units(batch)
    lists = _packed(units, tokens_per_microbatch)
    if ranks == 1 or not lists:
        return lists
    count = -(-len(lists) // ranks) * ranks
    low, high = 1, tokens_per_microbatch  # the smallest budget that needs no more lists
    while low < high:
        budget = (low + high) // 2
        if len(_packed(units, budget)) <= count:
            high = budget
        else:
            low = budget + 1
    return _packed(units, high)


def _units(batch: Batch) -> list[tuple[list[int], int]]:
    """The sequences that stay together, with their tokens, in the order of `micro_batches`."""
    lengths = batch.lengths
    groups = range(len(lengths)) if batch.prefixes is None else [group for group, _ in batch.prefixes]
    longest: dict[int, int] = {}
    for group, length in zip(groups, lengths, strict=True):
        longest[group] = max(length, longest.get(group, 0))
    order = sorted(range(len(lengths)), key=lambda i: (-longest[groups[i]], groups[i], -lengths[i]))
    together: dict[int, list[int]] = {}
    for i in order:
        together.setdefault(i if batch.pairs is None else batch.pairs[i][0], []).append(i)
    return [(unit, sum(lengths[i] for i in unit)) for unit in together.values()]


def _packed(units: Sequence[tuple[list[int], int]], budget: int) -> list[list[int]]:
    lists: list[list[int]] = []
    tokens = 0
    for unit, unit_tokens in units:
        if not lists or tokens + unit_tokens > budget:
            lists.append([])
            tokens = 0
        lists[-1] += unit
        tokens += unit_tokens
    return lists


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two sequences, for `prefixes`."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def common_prefixes(inputs: Sequence[np.ndarray], shortest: int = 32) -> tuple[tuple[int, int], ...]:
    """The `prefixes` of a batch with these inputs, `[n]` each. Sequences with the same first `shortest` inputs are a group, and
    share the longest prefix that all of them have. The last input of a sequence is never shared, so that each sequence runs at
    least one row.

    `common_prefixes([[5, 6, 7, 8], [5, 6, 9], [4, 4]], shortest=2)` is `((0, 2), (0, 2), (2, 0))`.
    """
    first: dict[bytes, int] = {}
    groups = [
        first.setdefault(ids[:shortest].tobytes(), index) if len(ids) > shortest else index
        for index, ids in enumerate(inputs)
    ]
    shared = {group: len(inputs[group]) - 1 for group in groups}
    for ids, group in zip(inputs, groups, strict=True):
        leader = inputs[group]
        most = min(len(ids) - 1, shared[group])
        differs = np.flatnonzero(ids[:most] != leader[:most])
        shared[group] = int(differs[0]) if len(differs) else most
    alone = {group for group in shared if groups.count(group) == 1}
    return tuple((group, 0 if group in alone else shared[group]) for group in groups)


def token_weights(
    aggregation: Aggregation,
    scored_T: Tensor,
    lengths: Sequence[int],
    constant_length: int | None = None,
    samples: Sequence[int] | None = None,
) -> Tensor:
    """Weights `[T]` for a reduction, zero at positions that are not scored. The denominators count the whole optimizer batch, never
    a micro-batch or a rank: an average of averages is the usual mistake of gradient accumulation.

    - `token`: 1 / (scored tokens of the batch), DAPO's mean (arXiv:2503.14476, eq. 8);
    - `sequence`: 1 / (sequences x the sequence's own scored tokens), GRPO's mean of means (arXiv:2402.03300, eq. 3);
    - `constant`: 1 / (sequences x constant_length), free of length bias (arXiv:2503.20783, section 3.1).

    Where several sequences are the branches of one sample, `samples` says which each is of, and the sample counts as one sequence
    with the scored tokens of all of them.
    """
    scored = scored_T.to(torch.float32)
    if aggregation == "token":
        return scored / scored.sum().clamp(min=1)
    count = len(lengths) if samples is None else len(set(samples))
    if aggregation == "constant":
        if not constant_length:
            raise ValueError("aggregation 'constant' divides by a length that has to be given")
        return scored / (count * constant_length)
    counts_B = torch.stack([part.sum() for part in scored.split(list(lengths))])
    if samples is not None:
        _, of_B = torch.unique(torch.tensor(samples), return_inverse=True)
        counts_B = counts_B.new_zeros(count).index_add_(0, of_B, counts_B)[of_B]
    return scored / (count * torch.repeat_interleave(counts_B.clamp(min=1), torch.tensor(lengths)))
