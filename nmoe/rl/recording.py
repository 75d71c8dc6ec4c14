"""Records every sample of a step, with a file of columns per token beside them (`[monitor] samples = "all"`).

Each line of samples/step_000010.jsonl is a sample. samples/step_000010.safetensors has, for the tokens that the policy sampled and
the step trained on, what the update knows of them anyway; no pass through the model is added. The file has these tensors:

    tokens     int64 [S]         for each line, how many tokens of it follow in the other tensors: all its sampled tokens, or 0
    advantage  float32 [N]       the factor of the policy loss, after a correction
    logprob    float32 [N]       the learner's log-probability before the step's first update
    entropy    float32 [N]       of the learner's distribution, in nats; only with one update per step
    weight     float32 [N]       the token's weight in the loss: mask, reduction and denominator in one
    gradient   float32 [N]       the derivative of the policy loss by the token's log-probability, its weight included
    experts    uint8 [N, Y, K]   the experts that computed the token's distribution (uint16 for more than 256 experts)

Its metadata has `gradient_sum`, the sum of `|gradient|` over all tokens of the batch.
"""

# Shapes: S recorded samples, N sampled tokens of recorded samples that were trained on, Y layers, K chosen experts.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from nmoe.config.commands import RLConfig
from nmoe.envs.pools.pool import stable_hash
from nmoe.rl.experience import Experience
from nmoe.rl.rollouts import Rollouts
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory

_OF = 2**64


@dataclass(frozen=True)
class Recorded:
    """A step's samples as lines, and the file of their columns."""

    samples: list[dict[str, Any]]
    columns: bytes


def columns_of(experience: Experience, tokens: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    """Returns the columns of all scored tokens of a batch, `[N]` each. `tokens` has the columns of its update
    (`PolicyUpdate.update`)."""
    batch, positions_N = experience.batch, experience.batch.scored_positions
    found = {"weight": batch.weights_T[positions_N], **tokens}
    if batch.routes_TYK is not None:
        found["experts"] = batch.routes_TYK[positions_N].to(torch.uint8 if experts <= 256 else torch.uint16)
    return found


class SampleRecorder:
    """Chooses the groups of a step that are recorded: the first, and of the others `monitor.samples_share`, until samples/ holds
    `monitor.samples_mb`."""

    def __init__(self, config: RLConfig, directory: Path, tokenizer: Tokenizer, experts: int) -> None:
        """`directory` is the run's; the present content of its samples/ counts. `experts` is the number of the model's experts."""
        self._seed, self._share = config.run.seed, config.monitor.samples_share
        self._most_bytes = config.monitor.samples_mb * 10**6
        self._masks_truncated = config.algorithm.mask_truncated
        self._tokenizer, self._experts = tokenizer, experts
        self._bytes = sum(file.stat().st_size for file in (directory / "samples").iterdir())

    def record(
        self, step: int, rollouts: Rollouts, experience: Experience | None, tokens: Mapping[str, Tensor]
    ) -> Recorded:
        """Returns the samples of a step to record. `tokens` has the columns of its update (`PolicyUpdate.update`); it is empty if
        the policy took no step."""
        room = self._bytes < self._most_bytes
        groups = [
            number
            for number in range(len(rollouts.groups))
            if number == 0 or (room and stable_hash("samples", self._seed, step, number) < self._share * _OF)
        ]
        columns = columns_of(experience, tokens, self._experts) if experience is not None and tokens else {}
        ranges = self._ranges(rollouts, experience) if columns else {}
        chosen = [trajectory for number in groups for trajectory in rollouts.groups[number].trajectories]
        samples = [record for number in groups for record in self._lines(step, number, rollouts, ranges)]
        file = _file(columns, [ranges.get(id(trajectory), slice(0, 0)) for trajectory in chosen])
        return Recorded(samples, file)

    def fills(self, size: int) -> bool:
        """Counts the bytes that a step's records took, and returns whether samples/ reached its limit by them."""
        before = self._bytes
        self._bytes += size
        return before < self._most_bytes <= self._bytes

    def _lines(
        self, step: int, number: int, rollouts: Rollouts, ranges: Mapping[int, slice]
    ) -> Iterator[dict[str, Any]]:
        reason = rollouts.why[number]
        for trajectory in rollouts.groups[number].trajectories:
            left_out = reason or (None if not ranges or id(trajectory) in ranges else "masked")
            text = self._tokenizer.decode(trajectory.token_ids)
            yield trajectory.record(step, text) | {"group": number, "left_out": left_out}

    def _ranges(self, rollouts: Rollouts, experience: Experience | None) -> dict[int, slice]:
        """Returns where the tokens of each trajectory lie among the scored ones of the batch, by the trajectory's identity."""
        assert experience is not None, "there are columns"
        trained = trained_samples(rollouts.kept_samples, self._masks_truncated)
        ranges, start = dict[int, slice](), 0
        for trajectory in trained:
            ranges[id(trajectory)] = slice(start, start := start + trajectory.sampled_tokens)
        assert start == len(experience.batch.scored_positions), "every sampled token is scored"
        return ranges


def trained_samples(samples: Sequence[Trajectory], masks_truncated: bool) -> list[Trajectory]:
    """Returns the samples that are in the batch, in its order."""
    return [sample for sample in samples if not (masks_truncated and sample.truncated)]


def _file(columns: Mapping[str, Tensor], ranges: Sequence[slice]) -> bytes:
    tensors: dict[str, NDArray[Any]] = {"tokens": np.array([part.stop - part.start for part in ranges])}
    metadata = {}
    trained = [part for part in ranges if part.start < part.stop]
    # Where no group is left out, the samples follow one another, and one slice takes all of them.
    if trained and all(one.stop == other.start for one, other in pairwise(trained)):
        trained = [slice(trained[0].start, trained[-1].stop)]
    for name, values_N in columns.items():
        column_N = values_N.numpy()
        tensors[name] = np.concatenate([column_N[part] for part in trained] or [column_N[:0]])
        if name == "gradient":
            metadata["gradient_sum"] = repr(float(values_N.double().abs().sum()))
    return save(tensors, metadata)
