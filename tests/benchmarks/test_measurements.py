"""Results of benchmarks: the form of their files, the verdicts on a busy machine, and the ratios of two commits."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import busy_machine
from compare_commits import compared
from result_files import read_records, write_records, write_results


def test_records_come_back_from_their_table_with_six_digits(tmp_path: Path) -> None:
    records = [
        {"seed": 0, "torch": "2.13", "kept": True, "right": 0.123456789, "steps": [1, 2.00000001], "more": "é"},
        {"seed": 1, "torch": "2.13", "kept": True, "right": 1234567.8, "steps": [3]},
        {"seed": 2, "torch": "2.13", "kept": True, "steps": [], "more": ""},
    ]
    path = tmp_path / "records.json"
    assert read_records(path) == []
    write_records(path, records)
    assert json.loads(path.read_text())["all"] == {"torch": "2.13", "kept": True}
    assert json.loads(path.read_text())["rows"][1] == [1, 1234570.0, [3]]
    assert len(path.read_text().splitlines()) == 4 + len(records) + 2
    wanted = [records[0] | {"right": 0.123457, "steps": [1, 2.0]}, records[1] | {"right": 1234570.0}, records[2]]
    assert read_records(path) == wanted
    for few in ([], records[:1]):
        write_records(path, few)
        assert read_records(path) == wanted[: len(few)]


def test_results_have_a_line_for_each_key_and_each_object_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, {"machine": {"cores": 2}, "rows": [{"s": 1 / 3}, {"s": 2}], "bounds": [0.5, 1]})
    lines = ["{", ' "machine": {"cores": 2},', ' "rows": [', '  {"s": 0.333333},', '  {"s": 2}', " ],"]
    assert path.read_text().splitlines() == [*lines, ' "bounds": [0.5, 1]', "}"]


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


def test_a_slow_round_of_one_side_leaves_the_medians() -> None:
    rounds = [(1.0, 1.1), (2.0, 2.2), (1.0, 1.1), (1.0, 9.0), (1.0, 1.1)]
    result = compared(rounds)
    assert (result["before_cpu_s"], result["after_cpu_s"], result["ratio"]) == (1.0, 1.1, 1.1)
    assert result["ratio_of_rounds"] == 1.1
    assert result["ratio_quartiles_apart"] > 3
