"""Computes the log-probabilities of given continuations, many sequences per forward pass.

Sequences are packed, and the common prefix of a group of sequences is computed once.
"""

# Shapes: T tokens of all sequences, S distinct rows among them, N tokens of continuations, n tokens of a piece, V vocabulary.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer

# Distinct tokens of a pass, unless one group alone has more.
PASS_TOKENS = 4096
# Rows of logits held at once.
_PIECE_ROWS = 256


@dataclass(frozen=True)
class Continuation:
    """A token sequence whose tokens from index `start` on get a log-probability, each given all tokens before it;
    `start` is at least 1."""

    token_ids: Sequence[int]
    start: int


@dataclass(frozen=True)
class Likelihood:
    """The natural log-probability of each token of a continuation, and whether every one of them was the most likely
    token (`greedy`)."""

    logprobs: tuple[float, ...]
    greedy: bool

    @property
    def mean_loss(self) -> float:
        """The mean negative log-probability per token; infinite without tokens, so that an empty continuation is never chosen."""
        return -sum(self.logprobs) / len(self.logprobs) if self.logprobs else float("inf")


def likelihoods(model: Transformer, groups: Iterable[Sequence[Continuation]]) -> Iterator[list[Likelihood]]:
    """Scores groups of continuations; yields a list of likelihoods for each group, in order.

    Continuations with a common prefix should be in one group, which computes the prefix once. No sequence may exceed
    the model's context.
    """
    batch: list[_Group] = []
    for group in groups:
        packed = _Group(group)
        if batch and sum(one.rows for one in batch) + packed.rows > PASS_TOKENS:
            yield from _score(model, batch)
            batch = []
        batch.append(packed)
    if batch:
        yield from _score(model, batch)


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Returns the length of the sequences' longest common prefix, in tokens."""
    shortest = min(map(len, sequences))
    first = sequences[0]
    return next((n for n in range(shortest) if any(one[n] != first[n] for one in sequences)), shortest)


class _Group:
    def __init__(self, continuations: Sequence[Continuation]) -> None:
        self.continuations = continuations
        self.prefix = common_prefix([one.token_ids for one in continuations])
        self.rows = self.prefix + sum(len(one.token_ids) - self.prefix for one in continuations)


@torch.inference_mode()
def _score(model: Transformer, groups: Sequence[_Group]) -> Iterator[list[Likelihood]]:
    ids: list[int] = []
    positions: list[int] = []
    first_uses: list[int] = []  # of each distinct row, its first index among all tokens
    row_of_token: list[int] = []  # of each token, its distinct row
    lengths: list[int] = []
    sources: list[int] = []  # distinct rows whose next token is scored
    targets: list[int] = []
    for group in groups:
        start = len(ids)
        for number, one in enumerate(group.continuations):
            new = 0 if number == 0 else group.prefix
            own = range(len(ids), len(ids) + len(one.token_ids) - new)
            rows = [*range(start, start + new), *own]
            first_uses += range(len(row_of_token) + new, len(row_of_token) + len(rows))
            ids += one.token_ids[new:]
            positions += range(new, len(one.token_ids))
            row_of_token += rows
            lengths.append(len(rows))
            sources += rows[one.start - 1 : -1]
            targets += one.token_ids[one.start :]
    device = model.device
    shared = torch.tensor(first_uses, device=device), torch.tensor(row_of_token, device=device)
    attend = PackedAttention(lengths, device, exact=model.exact, shared=shared)
    ids_S, positions_S = (torch.tensor(one, device=device) for one in (ids, positions))
    states_SD = model(ids_S, positions_S, attend, RouterTrace())
    logprobs, greedy = _of_targets(model, states_SD, sources, targets)
    done = 0
    for group in groups:
        found = []
        for one in group.continuations:
            span = slice(done, done + len(one.token_ids) - one.start)
            found.append(Likelihood(tuple(logprobs[span]), all(greedy[span])))
            done = span.stop
        yield found


def _of_targets(
    model: Transformer, states_SD: Tensor, sources: Sequence[int], targets: Sequence[int]
) -> tuple[list[float], list[bool]]:
    """Returns the log-probability of each target token at its source row, and whether it is the most likely token there."""
    logprobs: list[float] = []
    greedy: list[bool] = []
    for first in range(0, len(targets), _PIECE_ROWS):
        rows_n = torch.tensor(sources[first : first + _PIECE_ROWS], device=states_SD.device)
        targets_n = torch.tensor(targets[first : first + _PIECE_ROWS], device=states_SD.device)
        logits_nV = model.logits(states_SD[rows_n])
        logprobs += logits_nV.log_softmax(-1).gather(-1, targets_n[:, None])[:, 0].tolist()
        greedy += (logits_nV.argmax(-1) == targets_n).tolist()
    return logprobs, greedy
