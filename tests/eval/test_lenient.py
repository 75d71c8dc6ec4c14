"""Lenient grading: an answer counts wherever it stands, and a gain is parted into form and correctness."""

from __future__ import annotations

import asyncio

import pytest

from nmoe.eval.lenient import Gain, lenient_verdict, part_gain
from nmoe.types import Problem


@pytest.mark.parametrize(
    ("task", "gold", "text", "right"),
    [
        ("compare", "843", "To compare them, look at the hundreds. The larger number is 843, since 8 is", True),
        ("compare", "843", "843 is larger than 181", True),
        ("compare", "843", "The answer is 181.", False),
        ("compare", "843", "843 or 181?", None),
        ("gsm8k", "18", "She has 3 boxes of 6 eggs. The answer is 18 eggs. Then she", True),
        ("gsm8k", "18", "I do not know", None),
        ("text_match", "Paris", "paris.", True),
        ("text_match", "Paris", "The capital is Paris", False),
    ],
)
def test_an_answer_counts_wherever_it_stands(task: str, gold: str, text: str, right: bool | None) -> None:
    problem = Problem("p", task, "Which number is larger, 843 or 181? Answer with one number.", gold, task)
    verdict = asyncio.run(lenient_verdict(problem, text))
    assert (None if verdict is None else verdict.outcome == "correct") is right


def answers(in_form_right: int, in_form_wrong: int, right: int, wrong: int) -> list[tuple[bool, bool]]:
    return (
        [(True, True)] * in_form_right
        + [(True, False)] * in_form_wrong
        + [(False, True)] * right
        + [(False, False)] * wrong
    )


def test_a_gain_is_parted_by_hand() -> None:
    # In form 0.2 -> 0.8, right among these 0.5 -> 0.75, among the others 0.25 -> 0.5.
    before, after = answers(1, 1, 2, 6), answers(6, 2, 1, 1)
    gain = part_gain(before, after)
    assert gain is not None
    assert vars(gain) == pytest.approx(
        {"form": 0.6 * (0.625 - 0.375), "given_form": 0.5 * 0.25, "without_form": 0.5 * 0.25}
    )
    assert sum(vars(gain).values()) == pytest.approx(0.7 - 0.3)


def test_form_alone_and_correctness_alone() -> None:
    assert part_gain(answers(5, 5, 0, 10), answers(10, 10, 0, 0)) == Gain(0.25, 0.0, 0.0)
    assert part_gain(answers(5, 15, 0, 0), answers(15, 5, 0, 0)) == Gain(0.0, 0.5, 0.0)


def test_a_rate_that_a_model_does_not_show_is_the_others() -> None:
    # The base has no answer in form, so nothing is known of its rate there: the gain is form.
    assert part_gain(answers(0, 0, 1, 9), answers(9, 1, 0, 0)) == pytest.approx(Gain(0.8, 0.0, 0.0))
    assert part_gain(answers(0, 0, 1, 9), answers(0, 0, 5, 5)) is None
    with pytest.raises(ValueError, match="no answers"):
        part_gain([], answers(1, 0, 0, 0))
