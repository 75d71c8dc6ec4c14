"""Short questions in plain English: which messages are answers, and what an attack on the reading earns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nmoe.envs.pools import Pool
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.plain import read_choice, read_letter, read_number, read_order
from nmoe.types import Problem

MakePool = Callable[..., Pool]


def score(problem: Problem, answer: str) -> float:
    return asyncio.run(TASKS[problem.task_type].verify(problem, Attempt(answer))).score  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("72", "72"),
        ("The larger number is **72**.", "72"),
        ("72 is larger than 34", "72"),
        ("34 is larger than 72.", "34"),
        ("The larger of 34 and 72 is 72, because 7 > 3.", "72"),
        ("The answer is 34. No: 72", "72"),
        ("Which number is larger, 34 or 72?", None),
        ("34 72", None),
        ("34 or 72", None),
        ("172", None),
        ("72.5", None),
        ("neither", None),
    ],
)
def test_reading_a_choice(text: str, read: str | None) -> None:
    assert read_choice(text, ["34", "72"]) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("12", "12"),
        ("7 + 5 = 12", "12"),
        ("7 + 5 is 12, because 7 + 5 = 7 + 3 + 2", "12"),
        ("The sum is 1,200.50.", "1200.5"),
        ("Tom has 7 apples, gets 5 and so has 12.", "12"),
        ("It is \u22125", "-5"),
        ("twelve", None),
    ],
)
def test_reading_a_number(text: str, read: str | None) -> None:
    assert read_number(text) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("R", "r"),
        ('The first letter is "R".', "r"),
        ("The first letter of river is a consonant: R", "r"),
        ("It is a.", "a"),
        ("I think it is the letter t", "t"),
        ("r i v e r", None),
        ('What is the first letter of the word "river"?', None),
        ("it's", None),
    ],
)
def test_reading_a_letter(text: str, read: str | None) -> None:
    assert read_letter(text) == read


def test_reading_an_order() -> None:
    options = ["3", "11", "7"]
    assert read_order("3, 7, 11", options) == "3, 7, 11"
    assert read_order("From 3, 11, 7 to 3 < 7 < 11.", options) == "3, 7, 11"
    assert read_order("3, 7", options) is None
    assert read_order("3, 7, 7", options) is None


def test_a_long_message_is_read_in_bounded_time() -> None:
    for part in ("1 + ", "is ", "= ", '"a" ', "9,9."):
        text = part * 200_000
        read_number(text), read_letter(text), read_choice(text, ["34", "72"]), read_order(text, ["34", "72"])


def test_repeating_the_question_and_listing_earn_nothing(make_pool: MakePool) -> None:
    for problem in make_pool({"type": "generated", "task_type": "compare", "difficulty": [3, 3]}).take(50):
        assert score(problem, problem.gold) == 1
        assert score(problem, problem.question) == 0
        left, right = TASKS["compare"].options(problem)  # type: ignore[attr-defined]
        assert int(problem.gold) == max(int(left), int(right))
        assert score(problem, f"{left} {right}") == score(problem, f"{left} or {right}") == 0
