"""When a run may end before its last step."""

from __future__ import annotations

import pytest

from nmoe.eval.early_stopping import Rates, rates_of, reason_to_end

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
