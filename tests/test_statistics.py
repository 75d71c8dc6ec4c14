"""Statistics against numbers worked out by hand, brute force, and scipy's own t interval."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nmoe.statistics import (
    clustered_mean,
    newcombe,
    paired_difference,
    paired_p_value,
    share_interval,
    welch,
    wilson,
)


def wilson_by_hand(successes: int, total: int, z: float) -> tuple[float, float]:
    rate = successes / total
    centre = (rate + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(rate * (1 - rate) / total + z**2 / (4 * total**2))
    return centre - half, centre + half


@pytest.mark.parametrize(("successes", "total"), [(0, 10), (10, 10), (3, 10), (83, 200), (1, 1)])
def test_wilson_is_its_formula(successes: int, total: int) -> None:
    low, high = wilson_by_hand(successes, total, 1.959963984540054)
    interval = wilson(successes, total)
    assert interval.low == pytest.approx(max(low, 0), abs=1e-12)
    assert interval.high == pytest.approx(min(high, 1), abs=1e-12)


def test_wilson_in_figures() -> None:
    # 5 of 10 at z = 1.96: centre 0.5, half width sqrt(0.25/10 + 0.9604/100) * 1.96 / 1.38416
    assert wilson(5, 10).low == pytest.approx(0.2366, abs=5e-5)
    assert wilson(5, 10).high == pytest.approx(0.7634, abs=5e-5)
    assert wilson(0, 10).high == pytest.approx(0.2775, abs=5e-5)
    assert wilson(5, 10, confidence=0.9).low == pytest.approx(wilson_by_hand(5, 10, 1.6448536269514722)[0])


@pytest.mark.parametrize(("successes", "total"), [(-1, 3), (4, 3), (0, 0)])
def test_wilson_refuses_what_is_no_rate(successes: int, total: int) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        wilson(successes, total)


def test_clustered_mean_by_hand() -> None:
    # Mean 1/2; cluster sums of deviations: 1, -1/2, -1/2; 3/2 * (1 + 1/4 + 1/4) / 6^2 = 1/16.
    estimate = clustered_mean([1, 1, 0, 1, 0, 0], ["a", "a", "b", "c", "c", "c"])
    assert estimate.value == 0.5
    sums = [1.0, -0.5, 0.5 - 0.5 - 0.5]
    expected = math.sqrt(1.5 * sum(value**2 for value in sums) / 36)
    assert expected == 0.25
    assert estimate.standard_error == pytest.approx(0.25)
    # Student's t with 2 degrees of freedom: 4.302653 at 97.5%
    assert estimate.interval.low == pytest.approx(0.5 - 4.302653 * 0.25, abs=1e-6)
    assert estimate.interval.high == pytest.approx(0.5 + 4.302653 * 0.25, abs=1e-6)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_one_value_per_cluster_is_the_t_interval(values: list[float]) -> None:
    estimate = clustered_mean(values, range(len(values)))
    error = float(np.std(values, ddof=1) / math.sqrt(len(values)))
    assert estimate.standard_error == pytest.approx(error, abs=1e-9)
    half = stats.t.ppf(0.975, len(values) - 1) * error
    assert estimate.interval.high - estimate.interval.low == pytest.approx(2 * half, abs=1e-8)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=10), st.integers(2, 5))
def test_repeating_every_sample_adds_no_certainty(values: list[float], times: int) -> None:
    once = clustered_mean(values, range(len(values)))
    repeated = clustered_mean(values * times, list(range(len(values))) * times)
    assert repeated.standard_error == pytest.approx(once.standard_error, abs=1e-9)


def test_clustered_mean_refuses_what_has_no_spread() -> None:
    with pytest.raises(ValueError, match="two clusters or more, got 1"):
        clustered_mean([0, 1], ["a", "a"])
    with pytest.raises(ValueError, match="2 values but 1 cluster ids"):
        clustered_mean([0, 1], ["a"])


def test_paired_difference_by_hand() -> None:
    # Differences 1, 0, 1, 0: mean 1/2, standard deviation 1/sqrt(3), error 1/sqrt(12); t(3) is 3.182446 at 97.5%.
    estimate = paired_difference([0, 1, 0, 0], [1, 1, 1, 0])
    assert estimate.value == 0.5
    assert estimate.standard_error == pytest.approx(1 / math.sqrt(12))
    assert estimate.interval.low == pytest.approx(0.5 - 3.182446 / math.sqrt(12), abs=1e-6)
    assert estimate.interval.high == pytest.approx(0.5 + 3.182446 / math.sqrt(12), abs=1e-6)


def test_weighted_paired_difference_by_hand() -> None:
    # Weights 1, 2, 3 of differences 1, 0, 1: mean 4/6; w (d - mean) is 1/3, -4/3, 1. Error^2: 3/2 of their squares, 26/9, over 6^2.
    estimate = paired_difference([0, 1, 0], [1, 1, 1], [1, 2, 3])
    assert estimate.value == pytest.approx(2 / 3)
    assert estimate.standard_error == pytest.approx(math.sqrt(1.5 * 26 / 9 / 36))
    equal = paired_difference([0, 1, 0, 0], [1, 1, 1, 0], [2, 2, 2, 2])
    assert equal.interval.high == pytest.approx(paired_difference([0, 1, 0, 0], [1, 1, 1, 0]).interval.high)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=20))
def test_paired_difference_is_scipys(pairs: list[tuple[float, float]]) -> None:
    before, after = map(list, zip(*pairs, strict=True))
    differences = np.subtract(after, before)
    estimate = paired_difference(before, after)
    if np.std(differences) > 1e-6:  # scipy gives NaN for none
        interval = stats.ttest_rel(after, before).confidence_interval(0.95)
        assert estimate.interval.low == pytest.approx(interval.low, abs=1e-9)
        assert estimate.interval.high == pytest.approx(interval.high, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=20))
def test_what_is_said_of_two_models_is_scipys(pairs: list[tuple[float, float]]) -> None:
    """Wilson's interval, the paired test's p value and Welch's interval."""
    before, after = map(list, zip(*pairs, strict=True))
    right = sum(value > 0.5 for value in after)
    exact = stats.binomtest(right, len(after)).proportion_ci(0.9, method="wilson")
    assert (wilson(right, len(after), 0.9).low, wilson(right, len(after), 0.9).high) == (exact.low, exact.high)
    if np.std(np.subtract(after, before)) > 1e-6:
        assert paired_p_value(before, after) == pytest.approx(stats.ttest_rel(after, before).pvalue, abs=1e-9)
    if np.std(before) > 1e-6 and np.std(after) > 1e-6:
        interval, wanted = welch(before, after[1:]), stats.ttest_ind(after[1:], before, equal_var=False)
        assert interval is not None
        assert (interval.low, interval.high) == pytest.approx(tuple(wanted.confidence_interval(0.95)), abs=1e-9)


def test_paired_difference_refuses_unpaired_results() -> None:
    with pytest.raises(ValueError, match="results on 2 and 1 problems"):
        paired_difference([0, 1], [1])


def test_intervals_of_differences() -> None:
    # Newcombe 1998, table II, contrast (a): 56/70 - 48/80 is 0.2 with method 10's 0.0524 to 0.3339.
    interval = newcombe((48 / 80, 0.4904, 0.7004), (56 / 70, 0.6918, 0.8769))
    assert (interval.low, interval.high) == (pytest.approx(0.0524, abs=2e-4), pytest.approx(0.3339, abs=2e-4))
    assert welch([1.0], [2.0, 3.0]) is None
    assert welch([1.0, 1.0], [2.0, 2.0]) is None
    unpaired = welch([1.0, 2.0], [3.0, 4.0])
    assert unpaired is not None
    assert unpaired.low == pytest.approx(2 - 4.302653 * math.sqrt(0.5), abs=1e-5)


def test_the_interval_of_shares_is_near_wilsons_where_they_are_0_or_1() -> None:
    # 83 of 200: the extra quarters make the variance (48.555 + 0.1287)/(199 * 200), and Student's quantile is 1.972.
    interval, exact = share_interval([1.0] * 83 + [0.0] * 117), wilson(83, 200)
    assert interval.low == pytest.approx(exact.low, abs=2e-3)
    assert interval.high == pytest.approx(exact.high, abs=2e-3)
    assert interval.low < exact.low < exact.high < interval.high


def test_the_interval_of_shares_has_a_width_where_all_are_right_and_is_everything_of_one_problem() -> None:
    # (n + t^2/2 -+ t^2/2)/(n + t^2) with t = 2.262157: 10/15.117
    interval = share_interval([1.0] * 10)
    assert (interval.low, interval.high) == (pytest.approx(10 / (10 + 2.262157163**2)), 1.0)
    assert share_interval([0.5]) == share_interval([1.0])
    assert (share_interval([0.5]).low, share_interval([0.5]).high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        share_interval([0.5, 1.5])


def test_the_paired_p_value() -> None:
    # Differences 1, 1, 0, -1, 1: mean 0.4, s = 0.894427, t = 1 with 4 degrees of freedom: p = 0.373901.
    assert paired_p_value([0, 0, 1, 1, 0], [1, 1, 1, 0, 1]) == pytest.approx(0.373901, abs=1e-6)
    assert paired_p_value([0, 1], [0, 1]) == 1.0
    # Six of six better by the same: as six heads in a row, either way.
    assert paired_p_value([0] * 6, [1] * 6) == pytest.approx(2 / 64)
