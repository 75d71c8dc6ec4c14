"""What counts as a result of the benchmark of a busy machine, on runs that are written down."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import busy_machine


def runs(*seconds: float, others: float = 0.02, **figures: float) -> list[dict[str, Any]]:
    return [{"seconds": one, "others": others, "figures": {"trained": 0.95, **figures}} for one in seconds]


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ({"quiet": runs(100.0), "busy": runs(300.0), "before": runs(98.0)}, []),
        ({"quiet": runs(100.0, 300.0, 101.0), "busy": runs(150.0, 999.0, 160.0)}, []),  # medians
        ({"quiet": runs(100.0), "busy": runs(301.0)}, ["takes 3.01 times as long, and 3 are allowed"]),
        ({"quiet": runs(104.0), "busy": runs(200.0), "before": runs(100.0)}, ["1.040 times as long as before"]),
        ({"quiet": runs(100.0), "busy": runs(200.0, trained=0.9500001)}, ["figures differ between runs: trained"]),
        ({"quiet": runs(100.0, others=0.2), "busy": runs(200.0)}, ["used up to 0.20 cores"]),
    ],
)
def test_verdicts(sides: dict[str, list[dict[str, Any]]], expected: list[str]) -> None:
    found = busy_machine.verdicts(sides)
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))


def test_a_busy_machine_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_machine.os, "getloadavg", lambda: (0.31, 0.0, 0.0))
    with pytest.raises(SystemExit, match=r"the load is 0.31, and 0.3 is the most"):
        busy_machine.main([])
