"""Confidence intervals for proportions, for means, and for differences, paired or not.

| of | function | method |
|---|---|---|
| independent outcomes | `binomial_interval` | exact (Clopper and Pearson 1934) |
| shares per problem | `share_interval` | exact at the effective number of problems (Korn and Graubard 1998) |
| outcomes in clusters | `outcomes_interval` | one of the two above |
| shares of several sets | `stratified_share` | exact at the effective number of items |
| losses, rewards, seeds | `mean_interval`, `stratified_mean` | Student's t; of shares `within_share` |
| shares, paired | `paired_difference`, `paired_p_value` | Bonett and Price 2012; signs exchanged (Fisher 1935) |
| losses, paired | `paired_mean_difference` | Student's t of the differences |
| two unpaired results | `newcombe`, `welch` | Newcombe 1998, method 10; Welch 1947 |

All intervals are 95%. Intervals of proportions (shares) lie within [0, 1], and of their differences within [-1, 1]. An
interval of unbounded values is None if their spread is unknown, because they are fewer than `FEWEST` or all equal.
`benchmarks/interval_coverage.py` simulates how often each interval contains the true value.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

# Nothing of scipy.stats here: its import takes 0.8 s, and every command that reports an interval would wait for it.

FEWEST = 3
"""The least number of values, or effective number of weighted values, from which a spread is estimated."""

# The part of a problem that `share_interval` adds at 0 and at 1.
_AT_THE_ENDS = 0.25
# The items that `stratified_share` adds to each set, right at the mean share.
_SHRUNK = 2.0
# Up to so many differences all their signs are tried; beyond, Student's t is as good.
_FLIPPED = 16
# Differences of this relative size are rounding errors.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Interval:
    """A confidence interval: `Interval(low=0.349, high=0.484)`."""

    low: float
    high: float

    def clipped(self, low: float, high: float) -> "Interval":
        """Returns the part of the interval between `low` and `high`."""
        return Interval(max(low, self.low), min(high, self.high))


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and 95% interval: `Estimate(0.5, 0.1, Interval(0.28, 0.72), freedom=10.0)`.

    `interval` is None if the spread is unknown. `freedom` is the degrees of freedom of Student's t, infinite for a
    normal interval.
    """

    value: float
    standard_error: float
    interval: Interval | None
    freedom: float


@dataclass(frozen=True)
class PairedDifference:
    """The mean of b - a over problems that both results share, with its 95% interval: `PairedDifference(0.2,
    Interval(-0.08, 0.41))`."""

    value: float
    interval: Interval


def binomial_interval(successes: int, total: int) -> Interval:
    """Computes the exact 95% interval of the proportion of independent outcomes (Clopper and Pearson 1934).

    It contains the true value in at least 95% of cases for every number and proportion. Wilson's, which is narrower,
    falls to 92.2% at 50 outcomes and a proportion of 2%. Use it for one answer per problem, and `share_interval` for
    several. Raises ValueError unless 0 <= successes <= total and total > 0.
    """
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"{successes} successes of {total} is not a rate")
    return _exact(successes / total, total)


def share_interval(values: Sequence[float], weights: Sequence[float] | None = None) -> Interval:
    """Computes the 95% interval of the mean of a proportion per problem, such as the share of its samples that are
    right, or its pass@k.

    With `weights`, such as the number of steps of each solution, the interval is for the weighted mean: the share of
    all steps.

    It is the exact interval of the number of independent outcomes that would have the mean's standard error (Korn and
    Graubard 1998, "Confidence intervals for proportions with small expected number of positive counts estimated from
    survey data"). Near 0 and 1, only few problems show the spread, so a quarter of a problem at each end is added to
    the variance, up to the variance of as many outcomes as there are problems: one right sample of a thousand says more
    than none of ten. Wilson's interval at that number contains the true pass@4 of ten problems at 99% in 92.7% of cases
    (`benchmarks/interval_coverage.py`). A single problem has no spread and gives 0 to 1. Raises ValueError for a value
    outside [0, 1] and for an empty list.
    """
    shares, weights_ = np.asarray(values, dtype=np.float64), _relative(values, weights)
    if shares.min() < 0 or shares.max() > 1:
        raise ValueError("an interval of shares needs values between 0 and 1")
    count, mean, effective_count = len(shares), _mean_share(shares, weights_ / len(shares)), _effective(weights_)
    if effective_count < 1 + _ROUNDING:
        return Interval(0.0, 1.0)
    if mean in (0, 1):
        return _exact(mean, effective_count)
    shown = float(np.square(weights_ * (shares - mean)).sum()) / (count - 1) / count
    ends = _AT_THE_ENDS / effective_count * (mean**2 + (1 - mean) ** 2) / (count - 1)
    of_outcomes = mean * (1 - mean) / effective_count
    return _exact(mean, mean * (1 - mean) / min(shown + ends, max(shown, of_outcomes)))


def outcomes_interval(outcomes: Sequence[bool], clusters: Sequence[Hashable]) -> Interval:
    """Computes the 95% interval of the share of true outcomes, if outcomes are independent only between clusters.

    Clusters are, for example, the pairs of one prompt or the steps of one solution. The interval is exact if each
    cluster has a single outcome, else `share_interval` over clusters.
    """
    shares, counts = by_cluster(list(map(float, outcomes)), clusters)
    return binomial_interval(sum(outcomes), len(outcomes)) if max(counts) == 1 else share_interval(shares, counts)


def stratified_share(rights: Sequence[int], totals: Sequence[int], weights: Sequence[float]) -> Interval:
    """Computes the 95% interval of the weighted mean of the accuracies of several data sets, with `rights[i]` of
    `totals[i]` items right.

    It is the exact interval of the number of items that would have the mean's variance (Korn and Graubard 1998, as in
    `share_interval`). The variance of a data set is estimated with two more items at the mean accuracy, because a set
    of few items that are all right or all wrong has none.
    """
    right, total, weight = (np.asarray(one, dtype=np.float64) for one in (rights, totals, weights))
    weight = weight / weight.sum()
    mean = _mean_share(right / total, weight)
    shrunk = (right + _SHRUNK * mean) / (total + _SHRUNK)
    by_set = weight**2 / total
    variance = float((by_set * shrunk * (1 - shrunk)).sum())
    effective = mean * (1 - mean) / variance if 0 < mean < 1 else 1 / float(by_set.sum())
    return _exact(mean, effective)


def by_cluster(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[list[float], list[int]]:
    """Computes the mean of each cluster's values, and how many there are.

    Use the results as `values` and `weights` of `mean_interval` and `share_interval` if values are independent only
    between clusters, such as the steps of one solution (Miller 2024, "Adding Error Bars to Evals", section 2.2). Raises
    ValueError for lists of different lengths.
    """
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} values but {len(clusters)} cluster ids")
    found: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        found.setdefault(cluster, []).append(value)
    return [sum(cluster) / len(cluster) for cluster in found.values()], list(map(len, found.values()))


def mean_interval(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """Computes the mean of independent values, with its standard error and Student's t interval.

    With `weights`, such as the tokens of each sequence, it is the weighted mean, a ratio of two means. Its standard
    error is the jackknife's (Cochran, Sampling Techniques, 1977, section 6.17), and its degrees of freedom follow from
    the effective number of values (Kish 1965), because few long sequences show less of the spread than their number
    says. With equal weights both equal the ordinary t interval's. Raises ValueError for an empty list.
    """
    sample, weights_ = np.asarray(values, dtype=np.float64), _relative(values, weights)
    count, mean = len(sample), float((weights_ * sample).mean())
    if count == 1:
        return Estimate(mean, math.nan, None, 0.0)
    without = (mean * count - weights_ * sample) / (count - weights_)
    error = math.sqrt((count - 1) / count * float(np.square(without - mean).sum()))
    return _estimate(mean, error, _effective(weights_) - 1, float(np.abs(sample).max()))


def stratified_mean(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Computes the weighted sum of independent estimates, such as the losses of data sources by their shares, with its
    t interval.

    `parts` are pairs of a weight and an estimate. The degrees of freedom are Satterthwaite's (1946). There is no
    interval if a part has none.
    """
    value = sum(factor * one.value for factor, one in parts)
    if any(one.interval is None for _, one in parts):
        return Estimate(value, math.nan, None, 0.0)
    variances = [(factor * one.standard_error) ** 2 for factor, one in parts]
    spread = sum(variance**2 / one.freedom for variance, (_, one) in zip(variances, parts, strict=True))
    return _estimate(value, math.sqrt(sum(variances)), sum(variances) ** 2 / spread, abs(value))


def within_share(estimate: Estimate) -> Estimate:
    """Recomputes the interval of a mean of proportions, such as the results of several seeds, on the scale of log odds.

    So the interval stays between 0 and 1, and is longer towards the middle, where such results have their long tail.
    """
    mean, interval = estimate.value, estimate.interval
    if interval is None or not 0 < mean < 1:
        return Estimate(mean, estimate.standard_error, None, estimate.freedom)
    odds, half = special.logit(mean), (interval.high - mean) / (mean * (1 - mean))
    bounds = Interval(float(special.expit(odds - half)), float(special.expit(odds + half)))
    return Estimate(mean, estimate.standard_error, bounds, estimate.freedom)


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Estimates the probability that at least one of k samples is right, if `correct` of `samples` >= k samples were right.

    This is the unbiased estimate `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, arXiv:2107.03374, equation 1).
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def paired_difference(
    a: Sequence[float], b: Sequence[float], weights: Sequence[float] | None = None
) -> PairedDifference:
    """Computes the mean of b - a over problems, with its 95% interval; `a[i]` and `b[i]` are proportions from 0 to 1 on
    problem i.

    The difficulty of a problem, common to both, cancels, so the interval is narrower than for two separate means. It is
    Bonett and Price's adjusted Wald interval (2012, "Adjusted Wald Confidence Interval for a Difference of Binomial
    Proportions Based on Paired Data"), with two more problems, one that only a solves and one that only b solves, and
    Student's quantile: the normal quantile would make the interval of few problems without a change too narrow.
    Outcomes need not be 0 or 1: shares of several samples have the variance of their differences. Ten problems without
    a change bound the difference to 27 points. A single problem gives no information: -1 to 1.

    With `weights`, such as the steps of each solution, it is the weighted mean, at the effective number of problems
    (Kish 1965). Raises ValueError for lists that are empty or of different lengths.
    """
    differences = _differences(a, b)
    weights_ = _relative(differences, weights)
    mean, count = float((weights_ * differences).mean()), _effective(weights_)
    variance = float(np.square(weights_ * (differences - mean)).sum()) / len(differences) ** 2 * count
    if count < 1 + _ROUNDING:
        return PairedDifference(mean, Interval(-1.0, 1.0))
    centre, t = count * mean / (count + 2), _student(count - 1)
    squares = (count * (variance + mean**2) + 2) / (count + 2)
    half = t * math.sqrt((squares - centre**2) / (count + 2))
    return PairedDifference(mean, Interval(centre - half, centre + half).clipped(-1.0, 1.0))


def paired_mean_difference(a: Sequence[float], b: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """Computes the mean of b - a over pairs of unbounded values, such as losses of the same sequences, with the paired
    t interval.

    Raises ValueError for lists that are empty or of different lengths.
    """
    return mean_interval([*_differences(a, b)], weights)


def paired_p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the two-sided p-value of the difference between two models on the same problems.

    If the models are equal, each difference is as likely to have the opposite sign. With up to 16 problems that differ,
    all combinations of signs are tried (Fisher 1935, the permutation test; for outcomes of 0 or 1 it is McNemar's exact
    test). With more, it is the paired t test, but never less than the smallest value that signs can give, 2 / 2^n.
    Returns 1 if no problem differs. Raises ValueError for lists of different lengths.
    """
    differences = _differences(a, b)
    rounding = _ROUNDING * max(np.abs(a).max(initial=0), np.abs(b).max(initial=0))
    differing = differences[np.abs(differences) > rounding]
    if not len(differing):
        return 1.0
    if len(differing) <= _FLIPPED:
        sums = np.zeros(1)
        for one in differing:
            sums = np.concatenate([sums + one, sums - one])
        return float((np.abs(sums) >= abs(differing.sum()) - rounding * len(differing)).mean())
    estimate = mean_interval([*differences])
    p = 2 * special.stdtr(estimate.freedom, -abs(estimate.value) / max(estimate.standard_error, 1e-300))
    return max(float(p), 2 * 0.5 ** len(differing))


def newcombe(a: tuple[float, float, float], b: tuple[float, float, float]) -> Interval:
    """Computes the interval of `b - a` for two unpaired results `(value, low, high)`, by adding squares (Newcombe 1998,
    method 10)."""
    difference = b[0] - a[0]
    below = math.hypot(b[0] - b[1], a[2] - a[0])
    above = math.hypot(b[2] - b[0], a[0] - a[1])
    return Interval(difference - below, difference + above)


def welch(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Computes the 95% interval of the difference of two means, `b - a`, by Welch's t test.

    Returns None if `a` or `b` has fewer than two values, or if all values of both are equal within each.
    """
    if min(len(a), len(b)) < 2:
        return None
    # Each mean's squared error; Welch and Satterthwaite's degrees of freedom.
    of_a, of_b = mean_interval(a), mean_interval(b)
    variances = of_a.standard_error**2, of_b.standard_error**2
    spread = variances[0] ** 2 / of_a.freedom + variances[1] ** 2 / of_b.freedom
    scale = float(np.abs([*a, *b]).max())
    if math.sqrt(sum(variances)) <= _ROUNDING * scale:
        return None
    difference = of_b.value - of_a.value
    half = _student(sum(variances) ** 2 / spread) * math.sqrt(sum(variances))
    return Interval(difference - half, difference + half)


def _exact(share: float, total: float) -> Interval:
    """Computes Clopper and Pearson's interval for a proportion of `total` outcomes, a number that need not be whole."""
    right, wrong = share * total, (1 - share) * total
    low = special.betaincinv(right, wrong + 1, 0.025) if share > 0 else 0.0
    high = special.betaincinv(right + 1, wrong, 0.975) if share < 1 else 1.0
    return Interval(float(low), float(high))


def _mean_share(shares: np.ndarray, weights: np.ndarray) -> float:
    """Returns the mean by weights whose sum is 1, limited to the range of the values, so that rounding cannot exceed it."""
    return float(np.clip((weights * shares).sum(), shares.min(), shares.max()))


def _differences(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    if len(a) != len(b):
        raise ValueError(f"results on {len(a)} and {len(b)} problems cannot be paired")
    return np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)


def _relative(values: Sequence[float] | np.ndarray, weights: Sequence[float] | None) -> np.ndarray:
    """Returns the weights of values, scaled to a mean of 1; all 1 if there are none. Raises ValueError for an empty list."""
    if not len(values):
        raise ValueError("no value, so no mean")
    if weights is None:
        return np.ones(len(values))
    given = np.asarray(weights, dtype=np.float64)
    if len(given) != len(values):
        raise ValueError(f"{len(values)} values but {len(given)} weights")
    return given / given.mean()


def _effective(weights: np.ndarray) -> float:
    """Returns the effective number of weighted values: as many values of equal weight have the same variance (Kish 1965)."""
    return float(weights.sum() ** 2 / np.square(weights).sum())


def _student(freedom: float) -> float:
    return float(special.stdtrit(freedom, 0.975))


def _estimate(value: float, error: float, freedom: float, scale: float) -> Estimate:
    """Returns an estimate with its t interval, or without one if the spread is unknown; `scale` is the magnitude of the values."""
    if freedom < FEWEST - 1 - _ROUNDING or error <= _ROUNDING * scale:
        return Estimate(value, error, None, freedom)
    half = _student(freedom) * error
    return Estimate(value, error, Interval(value - half, value + half), freedom)
