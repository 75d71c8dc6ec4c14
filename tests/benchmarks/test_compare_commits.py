"""What benchmarks/compare_commits.py makes of the rounds of two commits."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from compare_commits import compared


def test_a_slow_round_of_one_side_leaves_the_medians() -> None:
    rounds = [(1.0, 1.1), (2.0, 2.2), (1.0, 1.1), (1.0, 9.0), (1.0, 1.1)]
    result = compared(rounds)
    assert (result["before_cpu_s"], result["after_cpu_s"], result["ratio"]) == (1.0, 1.1, 1.1)
    assert result["ratio_of_rounds"] == 1.1
    assert result["ratio_quartiles_apart"] > 3
