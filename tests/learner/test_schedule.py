"""The learning-rate schedule, step by step."""

import math

import pytest

from nmoe.learner.optimizer import learning_rate_factor


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
