"""Confidence intervals: for rates, means over problems, and differences, paired or not."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

# Nothing of scipy.stats here: its import takes 0.8 s, and every command that reports an interval would wait for it.

# The part of a problem that `share_interval` adds at 0 and at 1.
_AT_THE_ENDS = 0.25


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
    rate, z = successes / total, float(special.ndtri(0.5 + 0.5 * confidence))
    over = 2 * (total + z**2)
    centre, half = (2 * total * rate + z**2) / over, z / over * math.sqrt(4 * total * rate * (1 - rate) + z**2)
    return Interval(0.0 if successes == 0 else centre - half, 1.0 if successes == total else centre + half)


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
    half_width = float(special.stdtrit(len(ids) - 1, 0.975)) * standard_error
    return Estimate(mean, standard_error, Interval(mean - half_width, mean + half_width))


def share_interval(values: Sequence[float]) -> Interval:
    """The 95% interval of the mean of a share per problem, such as the part of its samples that are right, or its pass@k.

    Wilson's interval for the number of independent 0 or 1 outcomes that would have the mean's standard error (the effective
    sample size of Dean and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial Proportions in Clustered Surveys"),
    with Student's quantile. Near 0 and 1 few problems show the spread, and the ordinary t interval is far too narrow: 88% of
    those of pass@4 at 97.5% on 200 problems held the truth. So a quarter of a problem at each end is added to the variance
    (`benchmarks/interval_coverage.py`). A single problem shows no spread: 0 to 1. Raises ValueError for a value outside [0, 1]
    or none.
    """
    shares = np.asarray(values, dtype=np.float64)
    if not len(shares) or shares.min() < 0 or shares.max() > 1:
        raise ValueError("an interval of shares needs values between 0 and 1")
    count, mean = len(shares), float(shares.mean())
    if count == 1:
        return Interval(0.0, 1.0)
    squares = float(np.square(shares - mean).sum()) + _AT_THE_ENDS * (mean**2 + (1 - mean) ** 2)
    variance = squares / (count - 1) / count
    effective = mean * (1 - mean) / variance if 0 < mean < 1 else count
    z = float(special.stdtrit(count - 1, 0.975))
    centre = (mean + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z / (1 + z * z / effective) * math.sqrt(mean * (1 - mean) / effective + z * z / (4 * effective**2))
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """The probability that at least one of k samples is right, estimated from `correct` of `samples` >= k.

    This is the unbiased estimate `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, arXiv:2107.03374, equation 1).
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def paired_difference(a: Sequence[float], b: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The mean of b - a over problems, with the paired t interval (95%).

    With `weights`, such as the tokens of each sequence, the weighted mean: a ratio of means, whose error is that of the weighted
    differences in excess of it (Cochran, Sampling Techniques, 1977, section 6.4).

    `a[i]` and `b[i]` are two results on problem i. The difficulty that they share cancels, so the interval is narrower than
    that of two separate means. Raises ValueError for lengths that differ or fewer than two problems.
    """
    if len(a) != len(b):
        raise ValueError(f"results on {len(a)} and {len(b)} problems cannot be paired")
    differences = [after - before for before, after in zip(a, b, strict=True)]
    if weights is None:
        return clustered_mean(differences, range(len(a)))
    mean_weight = sum(weights) / len(weights)
    mean = sum(w * one for w, one in zip(weights, differences, strict=True)) / sum(weights)
    beyond = [mean + w / mean_weight * (one - mean) for w, one in zip(weights, differences, strict=True)]
    error = clustered_mean(beyond, range(len(a)))
    return Estimate(mean, error.standard_error, error.interval)


def paired_p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """The probability that two equal models differ at least so much on the same problems: the two-sided paired t test, which says
    less than 5% where the interval of `paired_difference` leaves out 0.

    1 where no problem differs. Where all differ by the same, their spread is unknown, and it is the sign test's.
    """
    differences = [after - before for before, after in zip(a, b, strict=True)]
    if not any(differences):
        return 1.0
    if len(set(differences)) == 1:
        return float(2 * 0.5 ** len(differences))
    estimate = paired_difference(a, b)
    return float(2 * special.stdtr(len(differences) - 1, -abs(estimate.value / estimate.standard_error)))


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
    # Each mean's squared error; Welch and Satterthwaite's degrees of freedom.
    of_a, of_b = float(np.var(a, ddof=1)) / len(a), float(np.var(b, ddof=1)) / len(b)
    freedom = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    difference = float(np.mean(b)) - float(np.mean(a))
    half_width = float(special.stdtrit(freedom, 0.975)) * math.sqrt(of_a + of_b)
    return Interval(difference - half_width, difference + half_width)
