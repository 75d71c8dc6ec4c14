"""The learning-rate schedule, step by step."""

import math

import pytest

from nmoe.learner.schedule import Schedule, learning_rate_factor, resumed_schedule


def test_values_by_hand() -> None:
    # 4 steps of warm-up, then 5 of a half cosine from 1 down to 0.1.
    factors = [learning_rate_factor(step, 9, 4, 0.1) for step in range(9)]
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, *cosine])
    assert cosine[0] == 1.0
    assert cosine[2] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)


def test_without_warm_up_the_first_step_is_whole() -> None:
    assert learning_rate_factor(0, 10, 0, 0.0) == 1.0
    assert learning_rate_factor(9, 10, 0, 0.0) == pytest.approx(0.0)


def test_past_the_end_it_stays_at_the_floor() -> None:
    assert learning_rate_factor(500, 10, 2, 0.2) == pytest.approx(0.2)


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (5, 5), (5, 4), (2, 10)])
def test_short_runs_do_not_divide_by_nothing(total: int, warmup: int) -> None:
    assert all(0 < learning_rate_factor(step, total, warmup, 0.1) <= 1 for step in range(total))


BEGAN = Schedule(total_steps=20, warmup_steps=4, min_lr_ratio=0.1)


def test_a_schedule_of_the_same_length_is_resumed_without_a_word() -> None:
    assert resumed_schedule(BEGAN.record(), BEGAN, asked=False, done=7, peak=1e-3) == (BEGAN, None)
    assert resumed_schedule(None, BEGAN, asked=False, done=7, peak=1e-3) == (BEGAN, None)


@pytest.mark.parametrize("steps", [12, 30])
def test_another_number_of_steps_leaves_the_schedule_as_it_was(steps: int) -> None:
    planned = Schedule(steps, 4, 0.1)
    schedule, note = resumed_schedule(BEGAN.record(), planned, asked=False, done=10, peak=1e-3)
    assert [schedule.factor(step) for step in range(20)] == [BEGAN.factor(step) for step in range(20)]
    assert [schedule.factor(step) for step in range(20, 30)] == [pytest.approx(0.1)] * 10
    assert note is not None
    assert "falling until optimizer step 20, and stays at 0.0001 after it" in note


def test_a_length_that_is_asked_for_is_taken_and_its_jump_is_named() -> None:
    planned = Schedule(36, 4, 0.1)
    schedule, note = resumed_schedule(BEGAN.record(), planned, asked=True, done=19, peak=1e-3)
    assert schedule == planned
    # The 15th of 31 steps after the warm-up: 0.1 + 0.9 * (1 + cos(15/31 pi)) / 2, and the last of the shorter schedule.
    assert note is not None
    assert note.endswith("the run began with 20; the next step takes 0.000573 in place of 0.0001")
