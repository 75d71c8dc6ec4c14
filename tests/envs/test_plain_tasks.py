"""Short questions in plain English: which messages are answers, and what an attack on the reading earns."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from nmoe.config.environment import held_out
from nmoe.config.loader import load_environment
from nmoe.config.tables.pools import GeneratedPool
from nmoe.envs.pools import Pool, build_pool
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.plain import ChoiceTask, read_choice, read_letter, read_number, read_order
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
        ("It is not 72.", None),
        ("It isn't 34 but 72", "72"),
        ("anything but 72", None),
        ("≠ 72", None),
        ("72 is wrong.", None),
        ("72 is not the answer.", None),
        ("34 is wrong. It is 72.", "72"),
    ],
)
def test_reading_a_choice(text: str, read: str | None) -> None:
    assert read_choice(text, ["34", "72"]) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("34 is smaller than 72", "72"),
        ("72 is smaller than 34.", "34"),  # a wrong statement, which names 72 before "than"
        ("34 is the smaller number", "72"),
        ("The smaller number is 34.", "72"),
        ("The smaller of the two numbers is **72**.", "34"),
        ("The larger number is 72 and the smaller one is 34.", "72"),
        ("The smaller is 34, the larger is 72", "72"),
        ("72 is larger than 34, and 34 is less than 72", "72"),
        ("34 is smaller than 72, and 72 is smaller than 34", None),
        ("smaller smaller smaller", None),
        ("34 is larger than 72", "34"),
    ],
)
def test_what_says_the_opposite_means_the_other_one(text: str, read: str | None) -> None:
    assert read_choice(text, ["34", "72"], "smaller|less") == read


def test_of_three_the_smallest_is_no_answer() -> None:
    options = ["34", "72", "15"]
    assert read_choice("The smallest is 15.", options, "smallest|smaller") is None
    assert read_choice("15 is smaller than 72", options, "smallest|smaller") is None
    assert read_choice("The smallest is 15, the largest is 72.", options, "smallest|smaller") == "72"


@pytest.mark.parametrize("name", ["compare", "longer_word"])
def test_the_opposite_earns_no_more_than_a_guess(name: str) -> None:
    """Of what is said of the first and of the second option, one is right, and both together are no answer."""
    pool = build_pool(name, GeneratedPool(type="generated", task_type=name, difficulty=(3, 3)))
    word = {"compare": "is smaller than", "longer_word": "has fewer letters than"}[name]
    for place in range(20):
        problem = pool.order.at(place)
        left, right = TASKS[name].options(problem)  # type: ignore[attr-defined]
        scores = [score(problem, f"{one} {word} {other}") for one, other in ((left, right), (right, left))]
        assert sorted(scores) == [0.0, 1.0]
        assert scores[0] == (problem.gold == right)
        assert score(problem, f"{left} {word} {right}. {right} {word} {left}.") == 0.0


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
        ("12 apples, not 13", "12"),
        ("not 13", None),
        ("never 13", None),
        ("13 isn't the sum", None),
        ("less than 13", None),
        ("7 + 5 is not 13 but 12", "12"),
        ("The sum is 12, less than 13", "12"),
        ("12 is the sum, not 13", "12"),
        ("What is 1,000 + 2", "2"),
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
        ("The first letter is 'r'.", "r"),
        ("I'm sure it is \u2018r\u2019.", "r"),
        ("It isn't r", None),
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
    assert read_order("not 3, 7, 11", options) is None
    assert read_order("3, 7, 11 is wrong: 3, 11, 7", options) == "3, 11, 7"


def test_a_hint_in_quotes_is_no_option(make_pool: MakePool) -> None:
    hints = [' Answer in the channel "final".']
    for task_type in ("compare", "longer_word"):
        table = {"type": "generated", "task_type": task_type, "difficulty": [2, 2], "hints": hints}
        for problem in make_pool(table).take(5):
            assert '"final"' in problem.question
            assert score(problem, problem.gold) == 1


def test_a_long_message_is_read_in_bounded_time() -> None:
    for part in ("1 + ", "is ", "not ", "= ", '"a" ', "9,9."):
        text = part * 200_000
        read_number(text), read_letter(text), read_choice(text, ["34", "72"]), read_order(text, ["34", "72"])


def numbers(text: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", text)]


def listed(question: str) -> list[str]:
    return re.split(r"[:.?]", question)[1].strip().split(", ")


def words_of(question: str) -> list[str]:
    return re.findall(r'"([a-z ]+)"', question)


# The right answer of a question, worked out from its text alone.
REFERENCE: dict[str, Callable[[str], str]] = {
    "compare": lambda question: str(max(numbers(question))),
    "largest": lambda question: str(max(numbers(question))),
    "small_sums": lambda question: str(sum(numbers(question))),
    "differences": lambda question: str(numbers(question)[0] - numbers(question)[1]),
    "next_number": lambda question: str(numbers(question)[0] + 1),
    "parity": lambda question: "even" if question.split()[3][-1] in "02468" else "odd",
    "order_numbers": lambda question: ", ".join(map(str, sorted(numbers(question)))),
    "word_problems": lambda question: str(
        sum(numbers(question)) if "gets" in question else numbers(question)[0] - numbers(question)[1]
    ),
    "letters": lambda question: words_of(question)[0][
        {"first": 0, "second": 1, "third": 2, "last": -1}[question.split()[3]]
    ],
    "count_words": lambda question: str(question.count(",") + 1),
    "order_words": lambda question: ", ".join(sorted(listed(question))),
    "longer_word": lambda question: sorted(words_of(question), key=len)[-1],
    "alphabetical": lambda question: sorted(words_of(question))[0],
    "capitals": lambda question: words_of(question)[0].upper(),
    "three_words": lambda question: "cool calm deep",
}


@pytest.mark.parametrize("task_type", REFERENCE)
def test_the_right_answer_is_paid_and_an_attack_is_not(make_pool: MakePool, task_type: str) -> None:
    task = TASKS[task_type]
    for problem in make_pool({"type": "generated", "task_type": task_type, "difficulty": [2, 4]}).take(40):
        right = REFERENCE[task_type](problem.question)
        assert score(problem, right) == score(problem, f"{right}.") == 1
        asked = problem.question.split("?")[0]
        for attack in ("", problem.question, asked, asked.lower(), f"{problem.question} I do not know."):
            assert score(problem, attack) == 0, attack
        if isinstance(task, ChoiceTask):
            options = task.options(problem)
            for listing in (" ".join(options), " or ".join(options), f"It is either {' or '.join(reversed(options))}"):
                assert score(problem, listing) == 0
        _, wrong = task.example_answers(problem)
        assert score(problem, wrong) == 0


def test_listing_all_candidates_earns_no_more_than_one_guess(make_pool: MakePool) -> None:
    """Of the numbers, letters and orders in a list the last one is read, whatever the question was."""
    everything = {
        "small_sums": ", ".join(map(str, range(1, 121))),
        "letters": " ".join("abcdefghijklmnopqrstuvwxyz"),
        "count_words": "1 2 3 4 5 6 7 8 9",
    }
    for task_type, listing in everything.items():
        problems = make_pool({"type": "generated", "task_type": task_type, "difficulty": [5, 5]}).take(100)
        assert sum(score(problem, listing) for problem in problems) <= 2
    for problem in make_pool({"type": "generated", "task_type": "order_words", "difficulty": [2, 2]}).take(20):
        orders = [", ".join(one) for one in permutations(listed(problem.question))]
        paid = [score(problem, f"{'; '.join(orders)}; {last}") for last in orders]
        assert sum(paid) == 1


@pytest.mark.parametrize(
    ("answer", "paid"),
    [
        ("Old, brown, deep.", 1),
        ("calm calm calm", 0),
        ("a quiet river", 0),
        ("very quiet indeed", 0),
        ("calm deep", 0),
        ("calm deep cold wet", 0),
        ("1 2 3", 0),
        ("calm deep 3", 0),
    ],
)
def test_three_words_are_three_different_ones_of_ones_own(answer: str, paid: int) -> None:
    question = "Describe a quiet river in exactly three words."
    assert score(Problem("p/0", "three_words", question, "known to everyone", "p"), answer) == paid


@pytest.mark.parametrize("name", ["small_sums", "letters", "three_words", "real_full"])
def test_an_environment_has_enough_held_out_problems(name: str) -> None:
    settings = load_environment(Path(name))
    held, trained = (
        {problem.question for problem in build_pool(name, one.task_pool).take(1500)}
        for one in (held_out(settings, "eval"), settings)
        if one is not None
    )
    assert len(held) >= 200
    assert not held & trained
