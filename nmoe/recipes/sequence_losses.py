"""Losses of single held-out sequences, so that two evaluations of the same sequences can be compared in pairs."""

# Shapes: N scored tokens.

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmoe.learner.batch import Batch
from nmoe.statistics import Estimate, mean_interval, stratified_mean


@dataclass(frozen=True)
class SequenceLosses:
    """The losses of several sequences, by `keys`: each sequence's loss, summed over the tokens that the loss covers,
    and their number."""

    keys: Sequence[str]
    sums: Sequence[float]
    counts: Sequence[int]

    @classmethod
    def of(cls, batch: Batch, logprobs_N: Tensor, keys: Sequence[str]) -> SequenceLosses:
        """Computes the losses of a batch's sequences from the log-probabilities of the tokens that the loss covers.

        `keys` has a name for each sequence.
        """
        losses_T = torch.zeros(batch.tokens, dtype=torch.float64)
        losses_T[batch.scored_T] = -logprobs_N.double().cpu()
        lengths = list(batch.lengths)
        sums = [float(part.sum()) for part in losses_T.split(lengths)]
        return cls(keys, sums, [int(part.sum()) for part in batch.scored_T.split(lengths)])

    @property
    def mean(self) -> float:
        return sum(self.sums) / sum(self.counts)

    @property
    def estimate(self) -> Estimate:
        """The mean loss per token, with its confidence interval over sequences."""
        scored = [(total / count, count) for total, count in zip(self.sums, self.counts, strict=True) if count]
        return mean_interval([loss for loss, _ in scored], [count for _, count in scored])


def loss_result(dataset: str, value: float, parts: Sequence[tuple[float, SequenceLosses]]) -> dict[str, Any]:
    """Returns a loss as an evaluation result for the directory eval/.

    `value` is the loss: the mean over the sources in `parts`, weighted by their shares. The result also has a 95%
    interval over sequences, if there are enough of them, and the loss and weight of every sequence.
    """
    interval = stratified_mean([(share, losses.estimate) for share, losses in parts]).interval
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
        **({} if interval is None else {"low": interval.low, "high": interval.high}),
        "lower_is_better": True,
        "outcomes": {key: loss for key, loss, _ in each},
        "weights": {key: weight for key, _, weight in each},
    }


def loss_note(result: Mapping[str, Any]) -> str:
    """Formats a loss as `held-out loss 2.1034 [2.0811, 2.1257]`, without the interval if there is none."""
    interval = f" [{result['low']:.4f}, {result['high']:.4f}]" if "low" in result else ""
    return f"held-out loss {result['value']:.4f}{interval}"


def content_keys(contents: Iterable[bytes]) -> list[str]:
    """Returns a key for each content that is the same in every run: 16 hexadecimal digits of its hash.

    Repeated contents are numbered: `ab12...`, `ab12...#2`.
    """
    found: dict[str, int] = {}
    keys = []
    for content in contents:
        key = hashlib.blake2b(content, digest_size=8).hexdigest()
        found[key] = found.get(key, 0) + 1
        keys.append(key if found[key] == 1 else f"{key}#{found[key]}")
    return keys
