"""The canary of an engine in another process: after each publication of weights its samples are compared with the learner.

Checksums, names and status 200 did not reveal weights that vLLM had not packed again, nor an output head that kept its old values;
log-probabilities do.
"""

# Shapes: T predicting positions, K chosen experts.

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from nmoe.learner.batch import Batch
from nmoe.learner.passes import MicroBatches, score
from nmoe.model.moe import RouterTrace
from nmoe.model.transformer import Transformer
from nmoe.types import Sample

R = TypeVar("R")
# The largest difference of a log-probability in fp32: kernels that sum in other orders give some 1e-5.
_BOUND = 1e-4
# In other precisions, the multiple of the difference at the first publication.
_TIMES_FIRST = 3.0
# And the largest that any comparison passes with: a healthy run of a 135M model in bfloat16 has up to 0.9 in 10,000 tokens, and
# experts that were not packed again 5 in the mean.
_MOST = 1.5
# The share of (layer, expert) that the compared tokens are to reach, and the most prompts that are sampled for it.
_COVERAGE, _MOST_PROMPTS = 0.99, 256
_PROMPTS, _PROMPT_TOKENS, _TOKENS = 8, 4, 32


class Compared(Protocol):
    """A learner, as the canary uses it: `ahead` is not 0 if its weights are newer than the published ones."""

    model: Transformer
    ahead: int

    def on_each_rank(self, function: Callable[[MicroBatches], R], batch: Batch) -> list[R]: ...


class LearnerCanary:
    """Prompts of random tokens, and the comparison of their samples with the learner's log-probabilities.

    There are as many prompts as it takes for the compared tokens to reach 99% of all (layer, expert) at the first publication, 256
    at most: weights of an expert that none reaches could be wrong without a trace.
    """

    tokens = _TOKENS

    def __init__(self, learner: Compared) -> None:
        self._learner = learner
        self._first: float | None = None
        self._reached = 0.0
        self._learned: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}  # by prompt, of the last publication
        self.prompts = self._drawn(_PROMPTS)

    def _drawn(self, count: int) -> list[tuple[int, ...]]:
        vocabulary = self._learner.model.config.vocab_size
        draw = random.Random(0)
        return [tuple(draw.randrange(vocabulary) for _ in range(_PROMPT_TOKENS)) for _ in range(count)]

    def more_prompts(self) -> bool:
        """Doubles the prompts if the last comparison reached too few experts; returns whether it did."""
        if self._reached >= _COVERAGE or len(self.prompts) >= _MOST_PROMPTS:
            return False
        self.prompts = self._drawn(2 * len(self.prompts))
        return True

    def difference(self, sampled: Sequence[tuple[tuple[int, ...], Sample]]) -> tuple[float, float]:
        """Returns the largest difference between the samples' log-probabilities and the learner's, and the share of all (layer,
        expert) that the sampled tokens reached. All ranks compute together. A server that is healed after the learner has stepped
        has to repeat the values from before."""
        compared = [(prompt, sample) for prompt, sample in sampled if sample.token_ids]
        if self._learner.ahead:
            return self._from_before(compared), self._reached
        batch = _batch_of(compared)
        parts = self._learner.on_each_rank(self._compare, batch)
        moes = self._learner.model.moe_layers()
        experts = self._learner.model.config.experts
        reached = torch.zeros(max(len(moes), 1), max(experts, 1), dtype=torch.bool)
        found = []
        for scores, chosen_NYK in parts:
            found.append(scores)
            for layer in range(chosen_NYK.shape[1] if moes else 0):
                reached[layer, chosen_NYK[:, layer].flatten().long()] = True
        pairs = [pair for part in found for pair in part]
        order = torch.cat([positions_N for _, positions_N in pairs]).argsort()
        learned_N = torch.cat([logprobs_N for logprobs_N, _ in pairs])[order].double()
        theirs_N = torch.tensor([value for _, sample in compared for value in sample.logprobs], dtype=torch.float64)
        self._reached = float(reached.double().mean()) if moes else 1.0
        largest = float((learned_N - theirs_N).abs().max())
        if self._first is None:
            self._first = largest
        if largest <= self.bound():
            rest = iter(learned_N.tolist())
            for prompt, sample in compared:
                self._learned[prompt] = sample.token_ids, [next(rest) for _ in sample.token_ids]
        return largest, self._reached

    def _from_before(self, compared: Sequence[tuple[tuple[int, ...], Sample]]) -> float:
        """Returns the largest difference from the log-probabilities of the last publication, whose seeds gave the same tokens;
        infinity if more than half are others. What follows another token cannot be compared."""
        pairs: list[tuple[float, float]] = []
        for prompt, sample in compared:
            before = self._learned.get(prompt, ([], []))
            for token, theirs, known, learned in zip(sample.token_ids, sample.logprobs, *before, strict=False):
                if token != known:
                    break
                pairs.append((theirs, learned))
        if 2 * len(pairs) <= sum(len(sample.token_ids) for _, sample in compared):
            return math.inf
        theirs_N, learned_N = torch.tensor(pairs, dtype=torch.float64).T
        return float((theirs_N - learned_N).abs().max())

    def bound(self) -> float:
        """Returns the largest difference that is rounding: 1e-4 in fp32, else three times the first comparison's, at most 1.5."""
        if self._learner.model.embedding.weight.dtype == torch.float32 or self._first is None:
            return _BOUND
        return min(_TIMES_FIRST * self._first, _MOST)

    @torch.no_grad()
    def _compare(self, micros: MicroBatches) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        model, found, chosen = self._learner.model, [], []
        for micro, positions_N, counts in micros.parts:
            on_device = micro.to(model.device)
            trace = RouterTrace(replay=on_device.routes_TYK)
            logprobs_N = score(model, on_device, trace, 1.0).logprobs_N.cpu()
            if counts:
                found.append((logprobs_N, positions_N))
                if trace.chosen_TK:
                    chosen.append(trace.routes()[on_device.scored_positions].cpu())
        return found, torch.cat(chosen) if chosen else torch.zeros(0, 0, 0)


def _batch_of(sampled: Sequence[tuple[tuple[int, ...], Sample]]) -> Batch:
    sequences = [[*prompt, *sample.token_ids] for prompt, sample in sampled]
    scored = [[False] * (len(prompt) - 1) + [True] * len(sample.token_ids) for prompt, sample in sampled]
    scored_T = torch.tensor([one for mask in scored for one in mask])
    routes = [sample.routes for _, sample in sampled if sample.routes is not None]
    return Batch(
        tuple(len(ids) - 1 for ids in sequences),
        torch.tensor([one for ids in sequences for one in ids[:-1]]),
        torch.tensor([one for ids in sequences for one in ids[1:]]),
        scored_T,
        torch.zeros(len(scored_T)),
        routes_TYK=torch.from_numpy(np.concatenate(routes)) if len(routes) == len(sampled) else None,
    )
