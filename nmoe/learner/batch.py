"""A packed training batch (sequences concatenated without padding, columns aligned with the predicting position) and its loss
weights.

A sequence of tokens `x[0..n]` has n predicting positions: position t reads `x[t]` and predicts `x[t + 1]`. The last token is never
read, so that it does not run through the model.
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
    """Returns the index of the sequence that each position of a packed batch belongs to, `[T]` int64."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


@dataclass(frozen=True)
class Batch:
    """A packed batch of sequences with a loss weight for each token and the columns that objectives read. Example: the sequence [5,
    6, 7, 2] with the prompt [5, 6] has `inputs_T = [5, 6, 7]`, `targets_T = [6, 7, 2]`, `scored_T = [False, True, True]` (the
    positions that the loss covers), and under a token mean `weights_T = [0, 1/2, 1/2]`.

    `weights_T` holds mask, reduction and global denominator in one: an objective returns a weighted sum, so that a batch splits
    into micro-batches or ranks without changing its gradient.

    `prefixes` gives for each sequence a group and the number of first inputs that all sequences of the group share, as the samples
    of one prompt do: `((0, 2), (0, 2), (1, 3))` says that the first two share their first two inputs. Shared inputs run through the
    model once, with the same values and gradients as if each sequence ran them.

    `pairs` gives for each sequence its preference pair and whether it is the preferred side: `((0, True), (0, False))`. Both
    sequences of a pair run in one micro-batch, because the loss of a pair is not a sum over its sequences.

    `old_logprobs_T` and `old_values_T` come from the learner before the first of several updates on the same samples. `returns_T`
    and `labels_T` are the targets of a value or classification head. Where the head judges reasoning steps of several tokens,
    `steps_T` numbers the step of each judged token, and `label_weights_T` is the loss weight of the step's label, separate from the
    token's weight in `weights_T`. `engines_T` is the number of the engine server that sampled a token, of several, and `versions_T`
    the version of the weights that did, where not all have the learner's.
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
    engines_T: Tensor | None = None
    versions_T: Tensor | None = None
    routes_TYK: Tensor | None = None
    kept_TM: Tensor | None = None
    prefixes: tuple[tuple[int, int], ...] | None = None
    pairs: tuple[tuple[int, bool], ...] | None = None
    samples: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        return int(self.inputs_T.shape[0])

    def positions(self) -> Tensor:
        """Returns each token's position within its sequence, from 0, `[T]`."""
        lengths_B = torch.tensor(self.lengths, dtype=torch.int64)
        starts_T = torch.repeat_interleave(lengths_B.cumsum(0) - lengths_B, lengths_B)
        return torch.arange(self.tokens) - starts_T

    def shared_rows(self) -> tuple[Tensor, Tensor] | None:
        """Removes the repeated inputs of shared prefixes: returns the rows to run through the model, `[S]`, and for every row of
        the batch the index of its result among those, `[T]`. None if no two sequences are in one group of `prefixes`."""
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
        """The indices of the positions that the loss covers (`scored_T`), `[N]`."""
        return self.scored_T.nonzero().flatten()

    def without_routes(self) -> Batch:
        """Returns the batch without recorded expert choices, for another model, which routes for itself: the record belongs to the
        policy that sampled."""
        return replace(self, routes_TYK=None)

    def with_reference(self, logprobs_N: Tensor) -> Batch:
        """Returns the batch with the column `reference_logprobs_T`, from a reference policy's log-probabilities of the scored
        tokens, `[N]`."""
        return replace(self, reference_logprobs_T=self.column(logprobs_N))

    def column(self, values_N: Tensor) -> Tensor:
        """Expands values of the scored tokens, `[N]`, to a column of the batch, `[T]`, with 0 at all other positions."""
        return torch.zeros(self.tokens, dtype=values_N.dtype).masked_scatter(self.scored_T, values_N)

    def sequence_ids(self) -> Tensor:
        """Returns the index of the sequence that each position belongs to, `[T]`."""
        return sequence_of(self.lengths)

    def sample_ids(self) -> Tensor:
        """Returns the index of the sample that each sequence belongs to, `[B]`. Without `samples`, each sequence is a sample."""
        return torch.arange(len(self.lengths)) if self.samples is None else torch.tensor(self.samples)

    def sample_lengths(self) -> tuple[int, ...]:
        """Returns the number of positions of each sample, summed over its sequences, which are adjacent in the batch."""
        if self.samples is None:
            return self.lengths
        found: dict[int, int] = {}
        for sample, length in zip(self.samples, self.lengths, strict=True):
            found[sample] = found.get(sample, 0) + length
        return tuple(found.values())

    def to(self, device: torch.device) -> Batch:
        """Returns the batch with all tensors on a device, `scored_positions` included, so that no later step waits for the device
        to find them."""
        columns: dict[str, Any] = {name: put(values_T, device) for name, values_T in self._columns()}
        there = replace(self, **columns)
        there.__dict__["scored_positions"] = put(self.scored_positions, device)
        return there

    def _columns(self) -> Iterator[tuple[str, Tensor]]:
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), Tensor):
                yield f.name, value

    def select(self, sequences: Sequence[int]) -> tuple[Batch, Tensor]:
        """Returns a batch of the given sequences, in the given order, and for each of its positions the index in this batch,
        `[T']`."""
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
        """Returns the first `positions` positions of a batch that has only one sequence."""
        assert len(self.lengths) == 1, "of one sequence"
        columns: dict[str, Any] = {name: values_T[:positions] for name, values_T in self._columns()}
        return replace(self, lengths=(positions,), prefixes=None, **columns)


def micro_batches(batch: Batch, tokens_per_microbatch: int, ranks: int = 1) -> list[list[int]]:
    """Splits a batch into lists of sequence indices of at most `tokens_per_microbatch` tokens each, longest sequences first; a
    sequence or preference pair above the limit gets a list to itself. Sequences that share a prefix follow the longest of them, and
    the two sides of a preference pair stay in one list.

    Sorting puts sequences of similar length together, for the length buckets of attention. With several `ranks` there are up to the
    next multiple of `ranks` lists, of about equal size: the largest list is as small as this order allows.
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
    """Groups the sequences that must share a micro-batch (the sides of a preference pair, else single sequences), and returns each
    group's indices and number of tokens, in the order of `micro_batches`."""
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
    """Returns the length of the common prefix of two sequences."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def common_prefixes(inputs: Sequence[np.ndarray], shortest: int = 32) -> tuple[tuple[int, int], ...]:
    """Finds the sequences that begin alike, and returns the field `prefixes` of a `Batch` with these inputs, arrays of token ids.
    Sequences with more than `shortest` inputs, of which the first `shortest` are the same, form a group, and share the longest
    prefix that all of them have in common. The last input of a sequence is never shared, so that each sequence runs at least one
    row.

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
    """Returns each position's weight in the loss, `[T]`, for a way to average over tokens; 0 at positions that are not scored,
    which the loss leaves out. The denominators count the whole optimizer batch, never a micro-batch or a rank: an average of
    averages is the usual mistake of gradient accumulation.

    - `token`: 1 / (scored tokens of the batch), DAPO's mean (arXiv:2503.14476, eq. 8);
    - `sequence`: 1 / (sequences x the sequence's own scored tokens), GRPO's mean of means (arXiv:2402.03300, eq. 3);
    - `constant`: 1 / (sequences x constant_length), free of length bias (arXiv:2503.20783, section 3.1).

    Where several sequences are branches of one sample, `samples` gives the sample of each sequence, and a sample counts as one
    sequence with the scored tokens of all its branches. Raises ValueError for `constant` without a `constant_length`.
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
