"""The 95% intervals of evaluations hold the truth as often as they say, and paired tests cry wolf as rarely as they say."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from interval_coverage import coverage, false_positives


def test_intervals_hold_the_truth_in_95_of_100_evaluations() -> None:
    shares = dict(coverage())
    assert len(shares) == 12
    assert {name: share for name, share in shares.items() if not 0.93 <= share <= 0.97} == {}


def test_equal_models_differ_in_5_of_100_paired_tests() -> None:
    shares = dict(false_positives())
    assert len(shares) == 6
    assert {name: share for name, share in shares.items() if not 0.035 <= share <= 0.065} == {}
