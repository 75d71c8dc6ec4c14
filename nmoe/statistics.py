"""Confidence intervals: for rates, means over problems, and differences, paired or not."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """A confidence interval: `Interval(low=0.349, high=0.484)`."""

    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and 95% interval: `Estimate(0.5, 0.1, Interval(0.28, 0.72))`."""

    value: float
    standard_error: float
    interval: Interval


def wilson(successes: int, total: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval for a rate (Wilson 1927). It stays inside [0, 1] and has a width even at 0 and 1.

    Use it for one answer per problem, and `clustered_mean` for several. Raises ValueError unless 0 <= successes <= total and
    total > 0.
    """
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"{successes} successes of {total} is not a rate")
    interval = stats.binomtest(successes, total).proportion_ci(confidence_level=confidence, method="wilson")
    return Interval(float(interval.low), float(interval.high))


def clustered_mean(values: Sequence[float], cluster_ids: Sequence[Hashable]) -> Estimate:
    """The mean of `values`, with a standard error that is clustered by problem.

    Samples of one problem (one cluster) tend to succeed and fail together, so they count for fewer independent observations.
    For G clusters and n values, SE^2 = G/(G-1) * sum over clusters of (sum of their deviations from the mean)^2 / n^2 (Miller
    2024, "Adding Error Bars to Evals", section 2.2, with the usual correction for few clusters). The 95% interval is Student's
    with G-1 degrees of freedom. With one value per cluster it is the ordinary t interval.

    Raises ValueError for fewer than two clusters, whose spread is unknown, or for lengths that differ. When all values are
    equal the interval has no width; for rates near 0 or 1 with one sample per problem prefer `wilson`.
    """
    if len(values) != len(cluster_ids):
        raise ValueError(f"{len(values)} values but {len(cluster_ids)} cluster ids")
    ids = list(dict.fromkeys(cluster_ids))
    if len(ids) < 2:
        raise ValueError(f"an interval needs two clusters or more, got {len(ids)}")
    index = {cluster: position for position, cluster in enumerate(ids)}
    samples = np.asarray(values, dtype=np.float64)
    mean = float(samples.mean())
    sums = np.zeros(len(ids))
    np.add.at(sums, [index[cluster] for cluster in cluster_ids], samples - mean)
    variance = len(ids) / (len(ids) - 1) * float(np.square(sums).sum()) / len(samples) ** 2
    standard_error = math.sqrt(variance)
    half_width = float(stats.t.ppf(0.975, df=len(ids) - 1)) * standard_error
    return Estimate(mean, standard_error, Interval(mean - half_width, mean + half_width))


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """The probability that at least one of k samples is right, estimated from `correct` of `samples` >= k.

    This is the unbiased estimate `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, arXiv:2107.03374, equation 1).
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """The mean of b - a over problems, with the paired t interval (95%).

    `a[i]` and `b[i]` are two results on problem i. The difficulty that they share cancels, so the interval is narrower than
    that of two separate means. Raises ValueError for lengths that differ or fewer than two problems.
    """
    if len(a) != len(b):
        raise ValueError(f"results on {len(a)} and {len(b)} problems cannot be paired")
    return clustered_mean([after - before for before, after in zip(a, b, strict=True)], range(len(a)))


def newcombe(a: tuple[float, float, float], b: tuple[float, float, float]) -> Interval:
    """The interval of `b - a` for two unpaired `(value, low, high)`, by squaring and adding (Newcombe 1998, method 10)."""
    difference = b[0] - a[0]
    below = math.hypot(b[0] - b[1], a[2] - a[0])
    above = math.hypot(b[2] - b[0], a[0] - a[1])
    return Interval(difference - below, difference + above)


def welch(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """The 95% interval of the difference of means, `b - a`, by Welch's t; None unless both have two values that vary."""
    if min(len(a), len(b)) < 2 or (len(set(a)) == 1 and len(set(b)) == 1):
        return None
    interval = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    return Interval(float(interval.low), float(interval.high))
