"""Probes during a run, and early stopping by their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe.eval.early_stopping import Rates, rates_of, reason_of_drops, reason_to_end, since_baseline, since_start
from nmoe.runs.ledger import OUTSIDE, Ledger


def result(value: float, role: str | None = None, right: tuple[int, ...] = ()) -> dict[str, Any]:
    of = {"mode": "greedy_pass@1", "dataset": "sort", "problems": 4, "value": value, "low": 0.0, "high": 1.0}
    more = {} if role is None else {"role": role}
    return of | more | ({"outcomes": {str(place): one for place, one in enumerate(right)}} if right else {})


def solved(count: int) -> dict[str, Any]:
    """The first of ten problems right."""
    return result(count / 10, OUTSIDE, tuple(int(place < count) for place in range(10)))


@pytest.mark.parametrize(
    ("history", "drops", "ends"),
    [
        ((9, 0, 0), 2, True),
        ((0, 9, 0, 0), 2, True),
        ((9, 0, 8, 0), 2, False),
        ((9, 8, 7), 2, False),
        ((9, 0), 2, False),
        ((9, 0), 1, True),
        ((9, 0, 0), 3, False),
        ((9, 0, 0), 0, False),
    ],
)
def test_a_loss_that_lasts_ends_a_run(history: tuple[int, ...], drops: int, ends: bool) -> None:
    reason = reason_of_drops([solved(count) for count in history], drops, OUTSIDE)
    assert (reason is not None) == ends
    if history == (9, 0, 0) and reason is not None:
        # 2^-9 for nine problems that are lost and none gained, times the two evaluations to choose the best from.
        said = "is worse than before in 2 evaluations in a row, 0.0% after 90.0% (p = 0.0039, paired by problem)"
        assert reason == f"greedy_pass@1 out of distribution {said}"


def test_what_the_rules_see_of_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    ledger = Ledger(tmp_path)
    for step, count in ((0, 2), (5, 9), (10, 8), (15, 1)):
        ledger.evaluation(step, {"results": [solved(count), {**solved(count), "dataset": "other"}]})
    assert ledger.probed() == {
        0: {"probe": 0.2}, 5: {"probe": 0.9}, 10: {"probe": 0.8}, 15: {"probe": 0.1, "probe_before": 0.9}
    }  # fmt: skip


def test_the_rules_see_a_loss_and_the_one_before_with_one_sign(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    ledger = Ledger(tmp_path)
    for step, value in ((5, 2.0), (10, 2.25), (15, 1.75)):
        losses = {str(place): value + place / 100 for place in range(10)}
        found = {"mode": "held_out_loss", "dataset": "texts", "problems": 10, "value": value, "lower_is_better": True}
        ledger.evaluation(step, {"results": [found | {"outcomes": losses}]})
    assert ledger.probed() == {5: {"probe": -2.0}, 10: {"probe": -2.25, "probe_before": -2.0}, 15: {"probe": -1.75}}


def test_the_probe_out_of_distribution_decides_which_step_is_best(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    ledger = Ledger(tmp_path)
    for step, outside, inside in ((0, 0.1, 0.1), (1, None, 0.9), (2, 0.6, 0.3), (3, None, 0.95), (4, 0.5, 0.99)):
        first = [] if outside is None else [result(outside, OUTSIDE)]
        ledger.evaluation(step, {"results": [*first, result(inside)]})
    assert ledger.probes() == {0: 0.1, 2: 0.6, 4: 0.5}
    assert [ledger.best_step(step) for step in (0, 1, 2, 3, 4)] == [None, None, 2, 2, 2]


def test_without_one_the_first_probe_decides_also_where_others_are_asked_oftener(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    ledger = Ledger(tmp_path)
    other = {**result(0.9), "dataset": "other"}
    for step, results in ((0, [result(0.1), other]), (1, [other]), (2, [result(0.5), other]), (3, [other])):
        ledger.evaluation(step, {"results": results})
    assert ledger.probes() == {0: 0.1, 2: 0.5}
    assert [ledger.best_step(step) for step in (1, 2, 3)] == [None, 2, 2]
    ledger.evaluation(4, {"results": [result(0.5)]})
    assert ledger.best_step(4) == 4, "the latest of equals"


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


CLIMBING: list[Rates] = [{"a": 0.5, "b": 0.1}, {"a": 0.6, "b": 0.1}, {"a": 0.96, "b": 0.1}]


def test_the_run_ends_when_every_source_is_solved_often_enough() -> None:
    assert reason_to_end([*CLIMBING, {"a": 0.96, "b": 0.94}], 0.95, None) is None
    assert reason_to_end([*CLIMBING, {"a": 0.95, "b": 0.96}], 0.95, None) == "every source is solved at 95% or more"
    assert reason_to_end([*CLIMBING, {"a": 1.0, "b": 1.0}], None, None) is None


def test_a_source_that_climbs_keeps_the_run_going_although_others_stand_still() -> None:
    climbing_slowly = [*CLIMBING, *({"a": 0.96, "b": 0.1 + 0.03 * n} for n in range(1, 6))]
    assert reason_to_end(climbing_slowly, 0.99, 2) is None
    still = [*climbing_slowly, {"a": 0.9, "b": 0.26}, {"a": 0.96, "b": 0.26}]
    assert reason_to_end(still[:-1], 0.99, 2) is None
    assert reason_to_end(still, 0.99, 2) == "no source has got better by 2% in 2 evaluations"


def test_gains_below_the_noise_add_up_to_one() -> None:
    """0.01 at a time: every second evaluation is a gain over the last that counted."""
    assert reason_to_end([{"a": 0.5 + 0.0101 * n} for n in range(20)], None, 2) is None


@pytest.mark.parametrize("patience", [1, 3])
def test_patience_counts_from_the_last_gain(patience: int) -> None:
    history: list[Rates] = [{"a": 0.2}, {"a": 0.5}, *({"a": 0.4} for _ in range(patience))]
    assert reason_to_end(history[:-1], None, patience) is None
    assert reason_to_end(history, None, patience) is not None


def test_rates_are_those_of_the_sources() -> None:
    results = [{"dataset": "skills", "value": 0.5}, {"dataset": "skills/add", "value": 0.4}]
    assert rates_of(results) == {"skills/add": 0.4}
    assert rates_of(results[:1]) == {"skills": 0.5}
    levels = [{"dataset": "math/level=Level 5", "value": 0.1}, {"dataset": "math/subject=Algebra", "value": 1.0}]
    assert rates_of([{"dataset": "math", "value": 0.7}, *levels]) == {"math": 0.7}
