"""A simulated run: its sizes, its times, and the faults that happen to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from nmoe.rollout.guards import Overdue

Fault = Literal["death", "hang", "lie", "learner"]
"""`death`: an engine ends. `hang`: it stops answering, and answers late. `lie`: from the next publication on it samples by wrong
weights, which the canary finds. `learner`: the training process ends, and resumes from its last checkpoint."""

_BLOCK = 4096  # groups whose lengths are drawn at once
_LONGEST_TOOL = 16.0  # times the median


@dataclass(frozen=True)
class Setting:
    """The sizes and times of a run. Times are in seconds, lengths in tokens of one sample."""

    tickets: int
    seed: int = 0
    staleness: int = 0
    groups: int = 16
    samples: int = 8
    overdue: Overdue = "wait"
    in_flight: Literal["recompute", "stale_kv", "drain"] = "recompute"
    engines: int = 1
    slots: int = 256
    restarts: int = 3
    least_engines: int = 1
    checkpoint_every: int = 100
    mean_tokens: float = 128.0
    spread: float = 1.0
    """of the logarithm of a length"""
    most_tokens: int = 256
    token_s: float = 0.02
    prefill_s: float = 0.00002
    """for each token that a sequence has when its engine gets new weights, to compute it anew"""
    tool_s: float = 0.0
    """median of a log-normal time in tools, of each sample"""
    equal: float = 0.0
    """share of the groups whose rewards are equal"""
    learn_s: float = 10.0
    sync_s: float = 1.0
    canary_s: float = 0.2
    start_s: float = 30.0
    """to start a process, engine or learner"""
    patience_s: float = 600.0
    """for which a run goes on with fewer than `least_engines`"""
    deadline_s: float = 60.0
    """until a hung engine is fenced"""
    unequal: float = 0.1
    """of the logarithm of an engine's speed, and of its link's"""
    doubled: float = 0.0
    """share of the groups that arrive a second time"""
    faults: tuple[tuple[float, Fault, int], ...] = ()
    """time, kind and engine of each"""


class Lengths:
    """The lengths of a group's samples, and their seconds in tools: functions of seed and position, as tokens are."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._block = lru_cache(maxsize=32)(self._drawn)

    def of(self, position: int) -> tuple[list[int], list[float]]:
        lengths, tools = self._block(position // _BLOCK)
        return lengths[position % _BLOCK], tools[position % _BLOCK]

    def _drawn(self, number: int) -> tuple[list[list[int]], list[list[float]]]:
        one, draw = self._setting, np.random.default_rng([self._setting.seed, number])
        shape = (min(_BLOCK, one.tickets - number * _BLOCK), one.samples)
        # The mean of a log-normal is exp(mu + spread^2 / 2).
        drawn = draw.lognormal(math.log(one.mean_tokens) - one.spread**2 / 2, one.spread, shape)
        tools = np.minimum(draw.lognormal(0.0, 1.0, shape), _LONGEST_TOOL) * one.tool_s
        return np.clip(drawn, 1, one.most_tokens).astype(np.int64).tolist(), tools.tolist()
