"""Metrics of a verifier: whether it finds the first wrong step, how often it is right, and whether its probabilities are
calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nmoe.statistics import Interval, clustered_mean, wilson

# A step is judged wrong if the probability that it is right is below this.
THRESHOLD = 0.5
BINS = 10
_DRAWS = 20_000


@dataclass(frozen=True)
class ProcessBench:
    """The result of `processbench`.

    Example: `ProcessBench(located=0.93, all_correct=0.97, f1=0.95, interval=Interval(0.93, 0.96), wrong=150, right=150)`.
    """

    located: float
    all_correct: float
    f1: float
    interval: Interval
    wrong: int
    right: int

    @property
    def rate_of_located(self) -> tuple[float, Interval]:
        return self.located, wilson(round(self.located * self.wrong), self.wrong)

    @property
    def rate_of_all_correct(self) -> tuple[float, Interval]:
        return self.all_correct, wilson(round(self.all_correct * self.right), self.right)


def processbench(step_probabilities: Sequence[Sequence[float]], first_wrong: Sequence[int | None]) -> ProcessBench:
    """Computes F1 as in ProcessBench (Zheng et al. 2024, arXiv:2412.06559, section 3).

    F1 is the harmonic mean of two accuracies: finding the first wrong step of solutions that have one, and finding none in the
    others. `step_probabilities` are the probabilities that each step is right. For the 95% interval, both rates are drawn from
    their Jeffreys posteriors given the counts. Raises ValueError if one of the two kinds of solution is missing.
    """
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for probabilities, wrong in zip(step_probabilities, first_wrong, strict=True):
        called = next((index for index, p in enumerate(probabilities) if p < THRESHOLD), None)
        hits[wrong is None].append(called == wrong)
    if not hits[True] or not hits[False]:
        missing = "without" if hits[False] else "with"
        raise ValueError(f"no solution {missing} a wrong step: F1 needs both kinds")
    located, clean = hits[False], hits[True]
    rates = sum(located) / len(located), sum(clean) / len(clean)
    rng = np.random.default_rng(0)
    drawn = [rng.beta(sum(one) + 0.5, len(one) - sum(one) + 0.5, _DRAWS) for one in (located, clean)]
    low, high = np.quantile(2 * drawn[0] * drawn[1] / (drawn[0] + drawn[1]), [0.025, 0.975])
    f1 = _harmonic(*rates)
    return ProcessBench(*rates, f1, Interval(min(f1, float(low)), max(f1, float(high))), len(located), len(clean))


def _harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b else 0.0


@dataclass(frozen=True)
class Calibration:
    """Whether events predicted with probability p occur in a share p of cases.

    ece: expected calibration error, the mean distance between a bin's rate and its mean probability, weighted by the bins'
    counts (Guo et al. 2017, arXiv:1706.04599, eq. 3).

    brier: mean squared distance between probability and outcome (Brier 1950).

    curve: for each non-empty bin its count, mean probability and rate.
    """

    ece: float
    brier: float
    curve: tuple[tuple[int, float, float], ...]


def calibration(probabilities: Sequence[float], outcomes: Sequence[bool], bins: int = BINS) -> Calibration:
    """Computes the calibration over bins of equal width. Raises ValueError if the lists are empty or differ in length."""
    if len(probabilities) != len(outcomes) or not probabilities:
        raise ValueError(f"{len(probabilities)} probabilities and {len(outcomes)} outcomes")
    p_N, y_N = np.asarray(probabilities, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    bin_N = np.minimum((p_N * bins).astype(int), bins - 1)
    curve = []
    for place in range(bins):
        chosen_N = bin_N == place
        if chosen_N.any():
            curve.append((int(chosen_N.sum()), float(p_N[chosen_N].mean()), float(y_N[chosen_N].mean())))
    ece = sum(count * abs(mean - rate) for count, mean, rate in curve) / len(p_N)
    return Calibration(ece, float(np.square(p_N - y_N).mean()), tuple(curve))


def rate(hits: Sequence[bool], clusters: Sequence[int] | None = None) -> tuple[float, Interval]:
    """Returns a share with its 95% interval: Wilson's, or clustered if several hits belong to one solution."""
    value = sum(hits) / len(hits)
    if clusters is None or len(set(clusters)) < 2:
        return value, wilson(sum(hits), len(hits))
    interval = clustered_mean(list(map(float, hits)), clusters).interval
    return value, Interval(max(0.0, interval.low), min(1.0, interval.high))
