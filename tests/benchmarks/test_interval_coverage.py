"""The 95% intervals of evaluations hold the truth and are not much wider than they have to be; the benchmark says so at length."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import interval_coverage
from interval_coverage import coverage, expected_width, false_positives, widest

from nmoe.statistics import Interval


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
