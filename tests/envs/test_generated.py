"""Generated problems: reproducible, of the difficulty asked for, and split by content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.registry import GENERATED_TASKS
from nmoe.envs.pools import Pool
from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.errors import UserError
from nmoe.types import Problem

MakePool = Callable[..., Pool]


def questions(problems: Iterable[Problem]) -> list[str]:
    return [problem.question for problem in problems]


@pytest.mark.parametrize("task_type", GENERATED_TASKS)
def test_generated_problems(make_pool: MakePool, task_type: str) -> None:
    table = {"type": "generated", "task_type": task_type, "difficulty": [2, 4], "seed": 3}
    problems = make_pool(table).take(60)
    assert problems == make_pool(table).take(60)
    assert [problem.id for problem in problems] == [f"demo/{index}" for index in range(60)]
    assert {problem.metadata["difficulty"] for problem in problems} == {2, 3, 4}
    assert len(set(questions(problems))) > 50
    for problem in problems:
        assert (problem.task_type, problem.source) == (task_type, "demo")
        assert asyncio.run(TASKS[task_type].verify(problem, Attempt(problem.gold))).score == 1


def test_a_seed_gives_other_problems(make_pool: MakePool) -> None:
    first, second = (
        make_pool({"type": "generated", "task_type": "add", "difficulty": [5, 5], "seed": seed}).take(20)
        for seed in (0, 1)
    )
    assert not set(questions(first)) & set(questions(second))


@pytest.mark.parametrize("task_type", GENERATED_TASKS)
def test_splits_share_no_question_whatever_the_seeds(make_pool: MakePool, task_type: str) -> None:
    def seen(split: str, seed: int, difficulty: list[int]) -> set[str]:
        pool = make_pool(
            {"type": "generated", "task_type": task_type, "difficulty": difficulty, "split": split, "seed": seed}
        )
        return set(questions(pool.take(400)))

    train = seen("train", 0, [1, 2]) | seen("train", 5, [2, 3])
    validation = seen("validation", 0, [2, 3])
    held_out = seen("eval", 0, [1, 3]) | seen("eval", 9, [2, 2])
    assert not train & held_out
    assert not validation & (train | held_out)
    assert {split_of(task_type, question) for question in held_out} == {"eval"}
    assert {split_of(task_type, question) for question in seen("all", 0, [2, 3])} == {"train", "validation", "eval"}


@pytest.mark.parametrize(
    ("task_type", "questions"),
    [("sort", ["Sort: 3712", "Sort: 1237", "Sort: 7321"]), ("add", ["Add: 47 + 85", "Add: 85 + 47"])],
)
def test_questions_that_answer_one_another_share_a_split(task_type: str, questions: list[str]) -> None:
    assert len({TASKS[task_type].split_key(question) for question in questions}) == 1


def test_one_question_in_eight_is_held_out(make_pool: MakePool) -> None:
    pool = make_pool({"type": "generated", "task_type": "add", "difficulty": [6, 6], "split": "all"})
    held_out = sum(split_of("add", question) == "eval" for question in questions(pool.take(4000)))
    assert held_out == pytest.approx(500, abs=65)  # three standard deviations of a binomial


def test_max_examples_makes_a_generated_pool_finite(make_pool: MakePool) -> None:
    settings = {"type": "generated", "task_type": "sort", "difficulty": [5, 5], "seed": 2}
    endless = make_pool(settings)
    finite = make_pool({**settings, "max_examples": 7})
    assert (endless.size, finite.size) == (None, 7)
    first, second = finite.take(7), finite.take(7)
    assert sorted(questions(first)) == sorted(questions(second)) == sorted(questions(endless.take(7)))
    assert first != second


def test_a_split_without_a_question_is_an_error(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe.envs.pools.generated._split", lambda *problem: "train")
    with pytest.raises(UserError, match="no sort problem of difficulty 1 to 1 is in the split 'eval'; raise"):
        make_pool({"type": "generated", "task_type": "sort", "difficulty": [1, 1], "split": "eval"})


def test_absurd_difficulty_is_an_error(make_pool: MakePool) -> None:
    with pytest.raises(UserError, match="difficulty 100000 is too much; 200 is the most"):
        make_pool({"type": "generated", "task_type": "add", "difficulty": [1, 100_000]})


@given(st.integers(0, 999), st.integers(0, 999))
def test_an_addition_and_its_commuted_twin_share_a_split(left: int, right: int) -> None:
    assert split_of("add", f"Add: {left} + {right}") == split_of("add", f"Add: {right} + {left}")
    key = TASKS["add"].split_key(f"Add: {right} + {left}")
    assert key == f"{min(left, right)} + {max(left, right)}"


def test_examples_are_solved_training_problems_before_the_question(make_pool: MakePool) -> None:
    table = {"type": "generated", "task_type": "compare", "difficulty": [2, 2], "split": "eval"}
    bare, shown = make_pool(table).take(40), make_pool(table | {"examples": 2}).take(40)
    assert [one.question for one in shown] == [one.question for one in bare]
    assert all(not one.history for one in bare)
    for problem in shown:
        assert [one.role for one in problem.history] == ["user", "assistant"] * 2
        for asked, answered in zip(problem.history[::2], problem.history[1::2], strict=True):
            assert split_of("compare", asked.content) == "train"
            assert asked.content != problem.question
            solved = Problem("x", "compare", asked.content, answered.content, "demo")
            assert asyncio.run(TASKS["compare"].verify(solved, Attempt(answered.content))).score == 1
            assert answered.channel == "final"
    assert make_pool(table | {"examples": 2}).take(40) == shown
    assert len({problem.history for problem in shown}) == 40


def test_hints_follow_the_question_and_change_neither_problem_nor_split(make_pool: MakePool) -> None:
    table = {"type": "generated", "task_type": "compare", "difficulty": [2, 2], "split": "eval"}
    hints = ["\nfinal:", " Final.", ""]
    bare, hinted = make_pool(table).take(60), make_pool(table | {"hints": hints, "examples": 1}).take(60)
    followed = [one.question.removeprefix(plain.question) for one, plain in zip(hinted, bare, strict=True)]
    assert {hint: followed.count(hint) > 10 for hint in hints} == dict.fromkeys(hints, True)
    assert [(one.gold, one.metadata) for one in hinted] == [(one.gold, one.metadata) for one in bare]
    assert all(one.history[0].content.endswith("Answer with one number.") for one in hinted)
    assert make_pool(table | {"hints": hints, "examples": 1}).take(60) == hinted
    assert make_pool(table | {"hints": hints}).order.fingerprint != make_pool(table).order.fingerprint
