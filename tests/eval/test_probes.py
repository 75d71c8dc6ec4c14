"""The probe out of the training distribution: it decides which checkpoint is best and when a run ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe.eval.baseline import since_baseline, since_start
from nmoe.eval.early_stopping import reason_of_drops
from nmoe.runs.ledger import OUTSIDE, Ledger


def result(value: float, role: str | None = None, right: tuple[int, ...] = ()) -> dict[str, Any]:
    of = {"mode": "greedy_pass@1", "dataset": "sort", "problems": 4, "value": value, "low": 0.0, "high": 1.0}
    more = {} if role is None else {"role": role}
    return of | more | ({"outcomes": {str(place): one for place, one in enumerate(right)}} if right else {})


@pytest.mark.parametrize(
    ("history", "drops", "ends"),
    [
        ((0.5, 0.4, 0.3), 2, True),
        ((0.1, 0.5, 0.4, 0.3), 2, True),
        ((0.5, 0.4), 2, False),
        ((0.5, 0.4, 0.4), 2, False),
        ((0.5, 0.4, 0.45, 0.4), 2, False),
        ((0.5, 0.4, 0.3), 3, False),
        ((0.5, 0.4, 0.3), 0, False),
    ],
)
def test_two_drops_in_a_row_end_a_run(history: tuple[float, ...], drops: int, ends: bool) -> None:
    reason = reason_of_drops(history, drops, OUTSIDE)
    assert (reason is not None) == ends
    if reason is not None:
        assert reason == "greedy_pass@1 out of distribution dropped 2 times in a row, 50.0% -> 40.0% -> 30.0%"


def test_the_probe_out_of_distribution_decides_which_step_is_best(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    ledger = Ledger(tmp_path)
    for step, outside, inside in ((0, 0.1, 0.1), (1, None, 0.9), (2, 0.6, 0.3), (3, None, 0.95), (4, 0.5, 0.99)):
        first = [] if outside is None else [result(outside, OUTSIDE)]
        ledger.evaluation(step, {"results": [*first, result(inside)]})
    assert ledger.probes() == {0: 0.1, 2: 0.6, 4: 0.5}
    assert [ledger.is_best(step) for step in (1, 2, 3, 4)] == [False, True, False, False]


def test_without_one_the_first_probe_decides_also_where_others_are_asked_oftener(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    ledger = Ledger(tmp_path)
    other = {**result(0.9), "dataset": "other"}
    for step, results in ((0, [result(0.1), other]), (1, [other]), (2, [result(0.5), other]), (3, [other])):
        ledger.evaluation(step, {"results": results})
    assert ledger.probes() == {0: 0.1, 2: 0.5}
    assert [ledger.is_best(step) for step in (1, 2, 3)] == [False, True, False]


def test_differences_from_the_start_are_paired_by_problem(tmp_path: Path) -> None:
    (tmp_path / "step_000000.json").write_text(json.dumps({"step": 0, "results": [result(0.25, right=(0, 0, 1, 0))]}))
    (found,) = since_baseline([result(0.75, right=(1, 0, 1, 1))], tmp_path)
    # Differences 1, 0, 0, 1 and two more problems, 1 and -1: mean 1/3, mean square 2/3; Student's quantile with 3 degrees of
    # freedom is 3.182446.
    assert found["since_start"]["difference"] == 0.5
    assert found["since_start"]["low"] == pytest.approx(1 / 3 - 3.182446 * ((2 / 3 - 1 / 9) / 6) ** 0.5, abs=1e-5)
    assert found["since_start"]["high"] == 1.0
    assert since_start(found) == ", +50.0% [-63.5%, +100.0%] since the start"
    assert since_start(result(0.75)) == ""
    other = result(0.75, OUTSIDE, right=(1, 0, 1, 1))
    assert since_baseline([other], tmp_path) == [other], "the probe of another role is another set of problems"
