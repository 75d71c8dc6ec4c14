"""When an evaluation is worse than an earlier one by more than chance, worked out by hand, and how often chance is taken for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from nmoe.runs.ledger import lasting_loss, loss_of


def result(right: Sequence[float], **more: Any) -> dict[str, Any]:
    outcomes = {str(place): float(one) for place, one in enumerate(right)}
    return {"mode": "greedy_pass@1", "dataset": "math", "value": sum(right) / len(right), "outcomes": outcomes, **more}


def first(count: int, of: int = 30) -> dict[str, Any]:
    """The first `count` problems right."""
    return result([1.0] * count + [0.0] * (of - count))


def test_one_fall_that_stays_is_a_loss_in_two_evaluations() -> None:
    history = [first(2), first(29), first(0)]
    loss = loss_of(history)
    assert loss is not None
    assert (loss.before, loss.now) == (29 / 30, 0.0)
    # 29 problems differ, all in one direction; there were two earlier evaluations to choose the best from.
    assert loss.p == pytest.approx(2 * 0.5**29, rel=1e-6)
    assert lasting_loss(history, 2) is None
    assert lasting_loss([*history, first(0)], 2) is not None
    assert lasting_loss([*history, first(0)], 0) is None
    assert lasting_loss([first(29), first(0), first(28)], 2) is None, "it came back"


def test_how_many_problems_a_loss_takes() -> None:
    """Five lost of 30 and none gained: 2^-5 = 0.031 against one earlier evaluation, and 0.0625 against two."""
    assert loss_of([first(10), first(5)]) is not None
    assert loss_of([first(10), first(6)]) is None, "2^-4 is more than 5%"
    assert loss_of([first(9), first(10), first(5)]) is None
    assert loss_of([first(9), first(10), first(4)]) is not None, "2 x 2^-6 is 0.031"
    assert loss_of([first(10), first(15)]) is None, "a gain is none"
    assert loss_of([first(10)]) is None


def test_the_first_counts_as_the_best_does() -> None:
    """The best has other problems than the last, of which many are gained as well; of the first, six are lost and none gained."""
    start = first(6, 12)
    best = result([0.0] * 5 + [1.0] * 7)
    last = result([0.0] * 12)
    assert loss_of([start, best, last]) is not None
    mixed = result([0.0] * 6 + [1.0] * 5 + [0.0])
    assert loss_of([start, best, mixed]) is None


def test_only_results_of_the_same_problems_in_the_same_way_are_compared() -> None:
    assert loss_of([first(29, 31), first(0)]) is None
    assert loss_of([first(29) | {"mode": "sampling_pass@1"}, first(0)]) is None
    assert loss_of([{"value": 0.9, "mode": "greedy_pass@1"}, {"value": 0.0, "mode": "greedy_pass@1"}]) is None
    falling = [result([2.0] * 9, lower_is_better=True), result([1.0] * 9, lower_is_better=True)]
    assert loss_of(falling) is None, "a loss that falls is better"
    assert loss_of(falling[::-1]) is not None


def test_equal_evaluations_end_hardly_any_run() -> None:
    """Six evaluations of one policy at the 5% level; two successive drops, the rule of before, end about half of such runs."""
    draw = random.Random(0)
    ended = fell = 0
    for _ in range(300):
        chances = [draw.random() for _ in range(100)]
        runs = [result([draw.random() < one for one in chances]) for _ in range(6)]
        ended += any(lasting_loss(runs[:count], 2) for count in range(3, 7))
        values = [one["value"] for one in runs]
        fell += any(values[place] > values[place + 1] > values[place + 2] for place in range(4))
    assert ended <= 9, "3%; `benchmarks/stopping.py` measures 2%"
    assert fell > 100
