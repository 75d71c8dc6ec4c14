"""Statistics against numbers worked out by hand, brute force, and scipy's own tests and intervals."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nmoe.statistics import (
    Estimate,
    Interval,
    binomial_interval,
    by_cluster,
    mean_interval,
    newcombe,
    outcomes_interval,
    paired_difference,
    paired_mean_difference,
    paired_p_value,
    share_interval,
    stratified_mean,
    stratified_share,
    welch,
    within_share,
)


def ends(interval: Interval | None) -> tuple[float, float]:
    assert interval is not None
    return interval.low, interval.high


@pytest.mark.parametrize(("successes", "total"), [(0, 10), (10, 10), (3, 10), (83, 200), (1, 1), (0, 400), (399, 400)])
def test_the_binomial_interval_is_scipys_exact_one(successes: int, total: int) -> None:
    exact = stats.binomtest(successes, total).proportion_ci(0.95, method="exact")
    assert ends(binomial_interval(successes, total)) == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_the_binomial_interval_in_figures() -> None:
    # None of 10: the upper end p has (1 - p)^10 = 0.025.
    assert ends(binomial_interval(0, 10)) == (0.0, pytest.approx(1 - 0.025**0.1))
    assert ends(binomial_interval(5, 10)) == pytest.approx((0.1871, 0.8129), abs=5e-5)


@pytest.mark.parametrize(("successes", "total"), [(-1, 3), (4, 3), (0, 0)])
def test_the_binomial_interval_refuses_what_is_no_rate(successes: int, total: int) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        binomial_interval(successes, total)


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=30))
def test_the_mean_of_equal_weights_is_scipys_t_interval(values: list[float]) -> None:
    estimate = mean_interval(values)
    error = float(np.std(values, ddof=1) / math.sqrt(len(values)))
    assert (estimate.value, estimate.standard_error) == pytest.approx((np.mean(values), error), abs=1e-8)
    assert mean_interval(values, [7.0] * len(values)).standard_error == pytest.approx(error, abs=1e-8)
    if error > 1e-6:
        wanted = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert ends(estimate.interval) == pytest.approx(wanted, abs=1e-7)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.5, 9)), min_size=3, max_size=12))
def test_a_weighted_mean_has_scipys_jackknife(pairs: list[tuple[float, float]]) -> None:
    values, weights = (np.array(one) for one in zip(*pairs, strict=True))
    count, estimate = len(values), mean_interval(list(values), list(weights))
    without = [np.average(np.delete(values, place), weights=np.delete(weights, place)) for place in range(count)]
    mean = np.average(values, weights=weights)
    error = math.sqrt((count - 1) / count * sum((one - mean) ** 2 for one in without))
    assert (estimate.value, estimate.standard_error) == pytest.approx((mean, error), abs=1e-9)
    assert estimate.freedom == pytest.approx(weights.sum() ** 2 / (weights**2).sum() - 1)


def test_too_few_or_equal_values_show_no_spread() -> None:
    assert mean_interval([2.0]).interval is None
    assert mean_interval([2.0, 3.0]).interval is None, "its t interval is 25 times the difference"
    assert mean_interval([0.1 + 0.2, 0.3, 0.3, 0.3]).interval is None, "they differ by rounding alone"
    assert mean_interval([1.0, 2.0, 3.0], [1000, 1, 1]).interval is None, "one value has nearly all the weight"
    # 1, 2, 3: error 1/sqrt(3), Student's quantile with 2 degrees of freedom 4.302653.
    assert ends(mean_interval([1.0, 2.0, 3.0]).interval) == pytest.approx(
        (2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5)
    )
    with pytest.raises(ValueError, match="no value"):
        mean_interval([])
    with pytest.raises(ValueError, match="2 values but 1 weights"):
        mean_interval([1.0, 2.0], [1.0])


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=10), st.integers(2, 5))
def test_repeating_every_sample_adds_no_certainty(values: list[float], times: int) -> None:
    means, weights = by_cluster(values * times, list(range(len(values))) * times)
    assert weights == [times] * len(values)
    assert mean_interval(means, weights).standard_error == pytest.approx(mean_interval(values).standard_error, abs=1e-9)


def test_values_by_cluster() -> None:
    assert by_cluster([1, 1, 0, 1, 0, 0], ["a", "a", "b", "c", "c", "c"]) == (
        [1, 0, pytest.approx(1 / 3)],
        [2, 1, 3],
    )
    with pytest.raises(ValueError, match="2 values but 1 cluster ids"):
        by_cluster([0, 1], ["a"])


def test_means_of_sources_add_their_variances() -> None:
    # Shares 1/2 and 1/2, errors 3 and 4: error sqrt(2.25 + 4), freedom 6.25^2 / (2.25^2/4 + 4^2/9).
    parts = [(0.5, Estimate(10, 3, Interval(0, 20), 4.0)), (0.5, Estimate(20, 4, Interval(0, 40), 9.0))]
    found = stratified_mean(parts)
    assert (found.value, found.standard_error) == (15, 2.5)
    assert found.freedom == pytest.approx(6.25**2 / (2.25**2 / 4 + 16 / 9))
    assert ends(found.interval)[1] == pytest.approx(15 + 2.5 * stats.t.ppf(0.975, found.freedom))
    assert stratified_mean([*parts, (0.1, mean_interval([1.0]))]).interval is None
    one = mean_interval([1.0, 2.0, 4.0])
    assert stratified_mean([(1.0, one)]) == one


def test_the_interval_of_seeds_whose_results_are_shares_stays_below_1() -> None:
    estimate = mean_interval([0.9, 0.99, 0.99])
    assert ends(estimate.interval)[1] > 1
    found = within_share(estimate)
    half = (ends(estimate.interval)[1] - 0.96) / (0.96 * 0.04)
    assert found.value == pytest.approx(0.96)
    assert ends(found.interval)[0] == pytest.approx(1 / (1 + math.exp(half) / 24))
    assert ends(found.interval)[1] == pytest.approx(1 / (1 + math.exp(-half) / 24))
    assert within_share(mean_interval([1.0, 1.0, 1.0])).interval is None


def test_paired_difference_by_hand() -> None:
    # Differences 1, 0, 1, 0 and two more problems, 1 and -1: mean 2/6, mean square 4/6; t(3) is 3.182446 at 97.5%.
    estimate = paired_difference([0, 1, 0, 0], [1, 1, 1, 0])
    half = 3.182446 * math.sqrt((4 / 6 - 1 / 9) / 6)
    assert estimate.value == 0.5
    assert ends(estimate.interval) == (pytest.approx(1 / 3 - half, abs=1e-6), 1.0)
    # Shares of samples: differences 0.5, 0, 0.25, 0.25.
    shares = paired_difference([0, 1, 0.5, 0.25], [0.5, 1, 0.75, 0.5])
    assert shares.value == 0.25
    half = 3.182446 * math.sqrt((2.375 / 6 - 1 / 36) / 6)
    assert ends(shares.interval) == pytest.approx((1 / 6 - half, 1 / 6 + half), abs=1e-6)


def test_ten_problems_without_a_change_bound_it() -> None:
    # 2.262157 * sqrt(2/12/12); a change of 0.31 in one direction would show in ten problems with a probability of 97.5%.
    assert ends(paired_difference([1] * 10, [1] * 10).interval) == pytest.approx((-0.266598, 0.266598), abs=1e-6)
    assert ends(paired_difference([1], [0]).interval) == (-1.0, 1.0)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 9)), min_size=2, max_size=12))
def test_a_paired_difference_lies_in_its_interval_and_turns_with_its_sides(
    rows: list[tuple[float, float, int]],
) -> None:
    before, after, weights = map(list, zip(*rows, strict=True))
    forth, back = paired_difference(before, after, weights), paired_difference(after, before, weights)
    assert -1 <= forth.interval.low <= forth.value <= forth.interval.high <= 1
    assert (forth.value, *ends(forth.interval)) == pytest.approx(
        (-back.value, -back.interval.high, -back.interval.low), abs=1e-12
    )
    equal = paired_difference(before, after, [3] * len(before))
    assert ends(equal.interval) == pytest.approx(ends(paired_difference(before, after).interval), abs=1e-12)


def test_weighted_paired_difference_by_hand() -> None:
    # Ten times weights 1, 2, 3 of differences 1, 0, 1: mean 4/6, 60^2/140 problems of equal weight. The variance of one of them is
    # the sum of (w (d - mean))^2, which are 1/9, 16/9 and 1, over 60^2, times their number.
    problems = 3600 / 140
    variance = 10 * 26 / 9 / 3600 * problems
    centre = problems * (2 / 3) / (problems + 2)
    squares = (problems * (variance + 4 / 9) + 2) / (problems + 2)
    half = stats.t.ppf(0.975, problems - 1) * math.sqrt((squares - centre**2) / (problems + 2))
    found = paired_difference([0, 1, 0] * 10, [1, 1, 1] * 10, [1, 2, 3] * 10)
    assert found.value == pytest.approx(2 / 3)
    assert ends(found.interval) == pytest.approx((centre - half, centre + half))


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=3, max_size=20))
def test_a_paired_difference_of_losses_is_scipys(pairs: list[tuple[float, float]]) -> None:
    before, after = map(list, zip(*pairs, strict=True))
    estimate = paired_mean_difference(before, after)
    if np.std(np.subtract(after, before)) > 1e-6:  # scipy gives NaN for none
        interval = stats.ttest_rel(after, before).confidence_interval(0.95)
        assert ends(estimate.interval) == pytest.approx((interval.low, interval.high), abs=1e-8)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=16))
def test_the_p_value_of_outcomes_is_mcnemars_exact_one(pairs: list[tuple[bool, bool]]) -> None:
    before, after = (list(map(float, side)) for side in zip(*pairs, strict=True))
    changed = [(a, b) for a, b in pairs if a != b]
    wanted = stats.binomtest(sum(b for _, b in changed), len(changed)).pvalue if changed else 1.0
    assert paired_p_value(before, after) == pytest.approx(wanted, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=2, max_size=9))
def test_the_p_value_of_shares_counts_signs(pairs: list[tuple[int, int]]) -> None:
    differences = [after - before for before, after in pairs]
    signs = list(itertools.product((1, -1), repeat=len(pairs)))
    sums = [abs(sum(s * d for s, d in zip(sign, differences, strict=True))) for sign in signs]
    wanted = sum(one >= abs(sum(differences)) for one in sums) / len(sums)
    # Tenths are not exact in binary: a difference by rounding is none.
    before, after = ([value / 10 for value in side] for side in zip(*pairs, strict=True))
    assert paired_p_value(before, after) == wanted
    assert paired_p_value([one + 0.1 for one in before], [one + 0.1 for one in after]) == wanted


def test_the_paired_p_value() -> None:
    # Two of eight signs of three equal differences give as much, in either direction.
    assert paired_p_value([0.1, 0.2, 0.3], [0.4, 0.5, 0.6]) == 0.25
    # Differences 1, 1, 0, -1, 1: of 16 signs, 10 give 2 or more, or -2 or less.
    assert paired_p_value([0, 0, 1, 1, 0], [1, 1, 1, 0, 1]) == 10 / 16
    assert paired_p_value([0, 1], [0, 1]) == 1.0
    # Six of six better by the same: as six heads in a row, either way.
    assert paired_p_value([0] * 6, [1] * 6) == 2 / 64
    # More than 16 that differ: Student's, and of equal differences what the signs can say.
    before, after = (
        [0.1 * place for place in range(20)],
        [0.1 * place + 0.01 * (-1) ** (place // 3) for place in range(20)],
    )
    assert paired_p_value(before, after) == pytest.approx(stats.ttest_rel(after, before).pvalue, abs=1e-9)
    assert paired_p_value([0.1 * one for one in range(20)], [0.1 * one + 0.3 for one in range(20)]) == 2 / 2**20
    with pytest.raises(ValueError, match="results on 2 and 1 problems"):
        paired_p_value([0, 1], [1])


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=20))
def test_welchs_interval_is_scipys(pairs: list[tuple[float, float]]) -> None:
    before, after = map(list, zip(*pairs, strict=True))
    if np.std(before) > 1e-6 and np.std(after[1:]) > 1e-6:
        wanted = stats.ttest_ind(after[1:], before, equal_var=False).confidence_interval(0.95)
        assert ends(welch(before, after[1:])) == pytest.approx((wanted.low, wanted.high), abs=1e-8)


def test_paired_differences_refuse_unpaired_results() -> None:
    for function in (paired_difference, paired_mean_difference):
        with pytest.raises(ValueError, match="results on 2 and 1 problems"):
            function([0, 1], [1])


def test_intervals_of_differences() -> None:
    # Newcombe 1998, table II, contrast (a): 56/70 - 48/80 is 0.2 with method 10's 0.0524 to 0.3339.
    interval = newcombe((48 / 80, 0.4904, 0.7004), (56 / 70, 0.6918, 0.8769))
    assert (interval.low, interval.high) == (pytest.approx(0.0524, abs=2e-4), pytest.approx(0.3339, abs=2e-4))
    assert welch([1.0], [2.0, 3.0]) is None
    assert welch([1.0, 1.0], [2.0, 2.0]) is None
    assert ends(welch([1.0, 2.0], [3.0, 4.0]))[0] == pytest.approx(2 - 4.302653 * math.sqrt(0.5), abs=1e-5)


def beta_ends(share: float, total: float) -> tuple[float, float]:
    """Clopper and Pearson's interval at a number of outcomes that is not whole."""
    low = stats.beta.ppf(0.025, share * total, (1 - share) * total + 1)
    return low, stats.beta.ppf(0.975, share * total + 1, (1 - share) * total)


def test_the_interval_of_shares_is_near_the_binomial_one_where_they_are_0_or_1() -> None:
    # 83 of 200: the variance of the mean is 48.555/(199 * 200), that of 199 problems, and more than that of 200 outcomes, so that
    # nothing is added.
    interval, exact = share_interval([1.0] * 83 + [0.0] * 117), binomial_interval(83, 200)
    assert pytest.approx(199) == 0.415 * 0.585 / (48.555 / 199 / 200)
    assert ends(interval) == pytest.approx(beta_ends(0.415, 199))
    assert interval.low < exact.low < exact.high < interval.high


@pytest.mark.parametrize(("problems", "samples"), [(10, 100), (30, 64), (200, 8)])
def test_one_right_sample_of_many_says_as_much_as_that_many_outcomes(problems: int, samples: int) -> None:
    rare = share_interval([1 / samples] + [0.0] * (problems - 1))
    assert ends(rare) == pytest.approx(beta_ends(1 / samples / problems, problems))
    none = share_interval([0.0] * problems)
    assert none.high < rare.high < none.high + 0.3 / samples**0.5
    turned = share_interval([1 - 1 / samples] + [1.0] * (problems - 1))
    assert ends(turned) == pytest.approx((1 - rare.high, 1 - rare.low))


def test_weights_that_go_with_the_shares_widen_the_interval_beyond_that_of_outcomes() -> None:
    # Ninety-nine solutions of one right step and one of ten wrong ones: mean 99/109. Its variance, from 99 (10/109)^2 + (990/109)^2
    # over 109^2 times 100/99, is that of 12 solutions; their effective number is 109^2/199, near 60.
    mean, squares = 99 / 109, 99 * (10 / 109) ** 2 + (990 / 109) ** 2
    total = mean * (1 - mean) / (squares / 109**2 * 100 / 99)
    assert total == pytest.approx(11.76, abs=0.01)
    found = share_interval([1.0] * 99 + [0.0], [1] * 99 + [10])
    assert ends(found) == pytest.approx(beta_ends(mean, total))


@given(st.lists(st.integers(1, 30), min_size=2, max_size=30), st.sampled_from([0.1, 1.0, 1 / 3]))
def test_where_all_are_right_or_all_wrong_no_weights_change_that(weights: list[int], unit: float) -> None:
    scaled = [weight * unit for weight in weights]
    effective = sum(scaled) ** 2 / sum(weight**2 for weight in scaled)
    right, wrong = share_interval([1.0] * len(scaled), scaled), share_interval([0.0] * len(scaled), scaled)
    assert ends(right) == (pytest.approx(0.025 ** (1 / effective)), 1.0)
    assert ends(wrong) == (0.0, pytest.approx(1 - 0.025 ** (1 / effective)))
    of_sets = stratified_share(weights, weights, scaled)
    assert ends(of_sets) == (pytest.approx(0.025 ** (1 / sum(weights))), 1.0)


def test_the_interval_of_shares_has_a_width_where_all_are_right_and_is_everything_of_one_problem() -> None:
    assert ends(share_interval([1.0] * 10)) == (pytest.approx(0.025**0.1), 1.0)
    assert share_interval([0.5]) == share_interval([1.0]) == Interval(0.0, 1.0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        share_interval([0.5, 1.5])


def test_the_interval_of_steps_goes_by_their_solutions() -> None:
    # Solutions of 1, 1 and 2 steps with 1, 0 and 1 right: mean 1/2, deviations by weight 3/8, -3/8 and 0, 16/6 solutions of equal
    # weight, and 3/(16/6) quarters at both ends, whose squares are 1/4 each.
    variance = (2 * 0.375**2 + 0.25 * 3 / (16 / 6) * 0.5) / 2 / 3
    found = outcomes_interval([True, False, True, False], ["a", "b", "c", "c"])
    assert ends(found) == pytest.approx(beta_ends(0.5, 0.25 / variance))
    assert outcomes_interval([True, False, True], "abc") == binomial_interval(2, 3)
    assert share_interval([0.2, 0.9, 1.0], [2, 2, 2]) == share_interval([0.2, 0.9, 1.0])


def test_the_interval_of_sets_of_one_share_is_that_of_all_their_items() -> None:
    # Sets of equal shares and weights by their items: the effective number is that of all items.
    assert ends(stratified_share([30, 60], [100, 200], [100, 200])) == pytest.approx(ends(binomial_interval(90, 300)))
    assert ends(stratified_share([0, 0], [10, 30], [1, 3])) == pytest.approx(ends(binomial_interval(0, 40)))
