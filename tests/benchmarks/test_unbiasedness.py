"""Statistical benchmarks in short: gradients without bias, and intervals that hold the truth."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import interval_coverage
from interval_coverage import coverage, expected_width, false_positives, widest
from unbiasedness import (
    METHODS,
    UNCLIPPED,
    Bandit,
    Method,
    advantage_gradients,
    bias,
    divergence_bias,
    sequence_bias,
    step_gradients,
    worst_error,
)

from nmoe.statistics import Interval

UNBIASED = ("ratio in the loss, unclipped", "correction without a cap")
DRAWS = 100_000


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_corrected_estimates_are_within_their_standard_errors(name: str, top_p: float) -> None:
    """Under top-p the policy that is meant is the one renormalised on the kept set that the sampler recorded."""
    bandit = Bandit.make(top_p=top_p)
    meant = bandit.exact_gradient()
    assert worst_error(bandit.estimated(METHODS[name], DRAWS), meant) < 4  # 12 free coordinates
    assert bias(bandit.expected(METHODS[name])[0], meant) < 1e-12


@pytest.mark.parametrize("name", sorted(METHODS.keys() - set(UNBIASED)))
def test_so_many_draws_would_show_a_bias(name: str) -> None:
    bandit = Bandit.make()
    estimate = bandit.estimated(METHODS[name], DRAWS)
    assert worst_error(estimate, bandit.exact_gradient()) > 10
    # What the draws show is what the sum over all arms says.
    assert worst_error(estimate, bandit.expected(METHODS[name])[0]) < 4


def test_without_the_recorded_kept_set_the_gradient_is_neither_policy_s() -> None:
    bandit = Bandit.make(top_p=0.8)
    blind, _ = bandit.expected(METHODS["ratio in the loss, unclipped"], record_kept=False)
    assert bias(blind, bandit.exact_gradient()) > 0.2
    assert bias(blind, bandit.exact_gradient(kept=False)) > 0.2


def test_a_higher_cap_leaves_less_bias_and_more_noise() -> None:
    bandit = Bandit.make()
    found = [bandit.expected(Method(UNCLIPPED, "tis", cap)) for cap in (1.0, 2.0, 4.0, 8.0)]
    biases = [bias(gradient, bandit.exact_gradient()) for gradient, _ in found]
    noises = [noise for _, noise in found]
    assert biases == sorted(biases, reverse=True)
    assert biases[0] > biases[-1]
    assert noises == sorted(noises)


def test_on_policy_nothing_is_biased() -> None:
    assert max(sequence_bias(staleness=0.0).values()) < 1e-12


def test_expected_gradients_of_group_advantages() -> None:
    results = advantage_gradients(group=4)
    assert results["rloo"] == pytest.approx((1.0, 1.0), abs=1e-6)
    assert results["dr_grpo"] == pytest.approx(
        (3 / 4, 1.0), abs=1e-6
    )  # (n - 1) / n of it: each sample is in its own mean
    for name in ("grpo", "maxrl"):  # prompts are weighed by their difficulty
        assert 0.9 < results[name][1] < 0.9999


def test_weights_take_the_bias_out_of_the_divergence() -> None:
    for staleness in (0.0, 0.25, 1.0):
        found = divergence_bias(staleness)
        assert max(found[f"{name}, weighted"] for name in ("k1", "k2", "k3")) < 1e-7
    stale = divergence_bias(0.25)
    assert stale["k2, not weighted"] > 0.1
    assert stale["k3, not weighted, against KL(ref || pi)"] > 0.1
    assert divergence_bias(0.0)["k3, not weighted, against KL(ref || pi)"] < 1e-7


@pytest.mark.parametrize(("turns", "most"), [(False, 3), (True, 2)])
def test_returns_to_go_have_the_gradient_of_the_sum_of_step_rewards(turns: bool, most: int) -> None:
    found = step_gradients(turns, most)
    for name in ("less the others' sum", "no baseline"):
        assert found[f"returns to go, {name}"][0] < 1e-6
    assert found["sum at every token, rloo"][0] < 1e-12
    assert found["returns to go, normalised steps"][0] > 0.5
    sums, returns = found["sum at every token, rloo"], found["returns to go, less the others' sum"]
    assert returns[1] < sums[1], "what was earned before a choice is noise to it"


def test_intervals_hold_the_truth_and_have_a_bounded_width() -> None:
    found = list(coverage(runs=40))
    assert {(name, n, share): one for name, n, share, one, _ in found if one is not None and one < 0.8} == {}
    assert {(name, n, share): one for name, n, share, _, one in found if one is not None and one > widest(name)} == {}


def test_an_interval_that_says_nothing_is_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval_coverage, "share_interval", lambda _: Interval(0.0, 1.0))
    monkeypatch.setattr(interval_coverage, "BY_SHARE", {"share/n": interval_coverage.rare_successes})
    monkeypatch.setattr(interval_coverage, "LOSSES", {})
    seen = {(n, share): wide for name, n, share, _, wide in coverage(runs=2) if wide and wide > widest(name)}
    assert {(10, 0.02), (50, 0.02), (400, 0.02)} <= seen.keys()
    # Of one outcome: 0 gives [0, 0.975], and 1 gives [0.025, 1].
    assert expected_width(1, 0.3) == pytest.approx(0.975)


def test_equal_models_are_seldom_called_different() -> None:
    shares = list(false_positives(runs=100))
    assert len(shares) == 6
    assert {name: (interval, p) for name, interval, p in shares if interval > 0.12 or p > 0.15} == {}
