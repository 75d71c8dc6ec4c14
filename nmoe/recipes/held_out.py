"""Losses on held-out sequences, with what a difference from another evaluation of the same sequences needs."""

# Shapes: N scored tokens.

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmoe.learner.batch import Batch


@dataclass(frozen=True)
class SequenceLosses:
    """The loss of each of several sequences, summed over its scored tokens, and how many those are."""

    keys: Sequence[str]
    sums: Sequence[float]
    counts: Sequence[int]

    @classmethod
    def of(cls, batch: Batch, logprobs_N: Tensor, keys: Sequence[str]) -> SequenceLosses:
        """Those of a batch's sequences, which `keys` name."""
        losses_T = torch.zeros(batch.tokens, dtype=torch.float64)
        losses_T[batch.scored_T] = -logprobs_N.double().cpu()
        lengths = list(batch.lengths)
        sums = [float(part.sum()) for part in losses_T.split(lengths)]
        return cls(keys, sums, [int(part.sum()) for part in batch.scored_T.split(lengths)])

    @property
    def mean(self) -> float:
        return sum(self.sums) / sum(self.counts)

    @property
    def error(self) -> float:
        """The standard error of the mean over tokens. It is a ratio of means, whose error is that of each sequence's loss in excess
        of the mean (Cochran, Sampling Techniques, 1977, section 6.4)."""
        beyond = [total - self.mean * count for total, count in zip(self.sums, self.counts, strict=True)]
        return math.sqrt(sum(one**2 for one in beyond)) / sum(self.counts)


def loss_result(dataset: str, value: float, parts: Sequence[tuple[float, SequenceLosses]]) -> dict[str, Any]:
    """The result of an evaluation, for eval/: the loss `value`, the mean of several sources by their shares, with its 95% interval
    over sequences, and the loss and weight of every sequence."""
    half = 1.96 * math.sqrt(sum((share * losses.error) ** 2 for share, losses in parts))
    each = [
        (key, total / count, share * count / sum(losses.counts))
        for share, losses in parts
        for key, total, count in zip(losses.keys, losses.sums, losses.counts, strict=True)
        if count
    ]
    return {
        "mode": "held_out_loss",
        "dataset": dataset,
        "problems": sum(len(losses.keys) for _, losses in parts),
        "value": value,
        "low": value - half,
        "high": value + half,
        "lower_is_better": True,
        "outcomes": {key: loss for key, loss, _ in each},
        "weights": {key: weight for key, _, weight in each},
    }


def content_keys(contents: Iterable[bytes]) -> list[str]:
    """A name for each content, the same in every run: 16 hexadecimal digits, and a number for one that comes again."""
    found: dict[str, int] = {}
    keys = []
    for content in contents:
        key = hashlib.blake2b(content, digest_size=8).hexdigest()
        found[key] = found.get(key, 0) + 1
        keys.append(key if found[key] == 1 else f"{key}#{found[key]}")
    return keys
