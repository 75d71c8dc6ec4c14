"""Metrics of a verifier: whether it finds the first wrong step, how often it is right, and whether its probabilities are
calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nmoe.statistics import Interval, binomial_interval, outcomes_interval

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
        return self.located, binomial_interval(round(self.located * self.wrong), self.wrong)

    @property
    def rate_of_all_correct(self) -> tuple[float, Interval]:
        return self.all_correct, binomial_interval(round(self.all_correct * self.right), self.right)


def processbench(step_probabilities: Sequence[Sequence[float]], first_wrong: Sequence[int | None]) -> ProcessBench:
    """Computes F1 as in ProcessBench (Zheng et al. 2024, arXiv:2412.06559, section 3).

    F1 is the harmonic mean of two accuracies: finding the first wrong step of solutions that have one, and finding none in the
    others. `step_probabilities` are the probabilities that each step is right. The 95% interval melds the exact ones of both rates:
    its lower end is a quantile of F1 under their lower confidence distributions, its upper end one under the upper ones (Fay,
    Proschan and Brittain 2015, "Combining one-sample confidence procedures"). Raises ValueError if one of the two kinds of solution
    is missing.
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
    counts = [(sum(one), len(one)) for one in (located, clean)]
    return ProcessBench(*rates, _harmonic(*rates), f1_interval(*counts), len(located), len(clean))


def f1_interval(located: tuple[int, int], clean: tuple[int, int]) -> Interval:
    """The 95% interval of the harmonic mean of two shares, each given as (right, total), by melding (`processbench`)."""
    rng = np.random.default_rng(0)

    def drawn(right: int, total: int, more: int) -> np.ndarray:
        # A Beta distribution with a parameter of 0 is all at one end.
        a, b = right + more, total - right + 1 - more
        return np.full(_DRAWS, float(b == 0)) if 0 in (a, b) else rng.beta(a, b, _DRAWS)

    low, high = (
        float(np.quantile(_harmonic(drawn(*located, more), drawn(*clean, more)), level))
        for more, level in ((0, 0.025), (1, 0.975))
    )
    return Interval(low, high)


def _harmonic(a: Any, b: Any) -> Any:
    """The harmonic mean, of 0 and 0 as of a little more than 0."""
    return 2 * a * b / (a + b + np.finfo(float).tiny)


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


def rate(hits: Sequence[bool], clusters: Sequence[int]) -> tuple[float, Interval]:
    """Returns a share with its 95% interval over clusters, such as the solutions that the judged steps belong to."""
    return sum(hits) / len(hits), outcomes_interval(hits, clusters)
