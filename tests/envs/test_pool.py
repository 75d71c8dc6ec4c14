"""Task pools: generated problems, records, and labelled steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.config.registry import GENERATED_TASKS
from nmoe.envs.pools import Pool
from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.task import SandboxTask
from nmoe.errors import UserError
from nmoe.types import Problem

MakePool = Callable[..., Pool]


def jsonl_pool(directory: Path, answers: Sequence[int]) -> dict[str, Any]:
    path = directory / "records.jsonl"
    path.write_text("".join(json.dumps({"problem": f"Is it {n}?", "answer": str(n)}) + "\n" for n in answers))
    return {"type": "jsonl", "path": str(path), "task_type": "add"}


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("pools")
    generated = {"type": "generated", "task_type": "sort", "difficulty": [2, 5]}
    jsonl = jsonl_pool(directory, range(5))
    return {
        "endless": generated,
        "finite": {**generated, "max_examples": 6},
        "records": jsonl,
        "mixture": {
            "type": "mixture",
            "sources": [
                {**generated, "name": "generated", "weight": 1.0},
                {**jsonl, "name": "records", "weight": 2.5},
                {**generated, "max_examples": 3, "name": "few", "weight": 0.5},
            ],
        },
    }


KINDS = st.sampled_from(["endless", "finite", "records", "mixture"])


@settings(max_examples=40, deadline=None)
@given(KINDS, st.lists(st.integers(0, 9), max_size=5), st.integers(0, 12))
def test_a_resumed_pool_goes_on_exactly(
    make_pool: MakePool, pools: dict[str, dict[str, Any]], kind: str, takes: list[int], after: int
) -> None:
    pool = make_pool(pools[kind])
    before = [problem for n in takes for problem in pool.take(n)]
    state = json.loads(json.dumps(pool.state()))
    resumed = make_pool(pools[kind])
    resumed.load_state(state)
    continuation = resumed.take(after)
    assert continuation == pool.take(after)
    assert before + continuation == make_pool(pools[kind]).take(sum(takes) + after)
    assert resumed.state() == pool.state()


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"difficulty": [2, 6]}, {"task_type": "add"}, {"split": "all"}, {"max_examples": 9}],
    ids=lambda change: next(iter(change)),
)
def test_a_state_of_another_pool_is_refused(
    make_pool: MakePool, pools: dict[str, dict[str, Any]], change: dict[str, Any]
) -> None:
    pool = make_pool(pools["endless"])
    state = make_pool({**pools["endless"], **change}).state()
    with pytest.raises(UserError, match="saved position belongs to another pool than 'demo'"):
        pool.load_state(state)
    assert pool.take(3) == make_pool(pools["endless"]).take(3)


def test_changed_data_is_another_pool(make_pool: MakePool, tmp_path: Path) -> None:
    state = make_pool(jsonl_pool(tmp_path, [1, 2, 3])).state()
    with pytest.raises(UserError, match="its settings or its data have changed"):
        make_pool(jsonl_pool(tmp_path, [1, 2, 4])).load_state(state)


@pytest.mark.parametrize("taken", [-1, True, 1.5, "3", None])
def test_a_position_that_is_none_is_refused(
    make_pool: MakePool, pools: dict[str, dict[str, Any]], taken: object
) -> None:
    pool = make_pool(pools["endless"])
    with pytest.raises(UserError, match="is not a number of problems"):
        pool.load_state({**pool.state(), "taken": taken})


def test_a_drawn_problem_knows_its_position_in_the_order(make_pool: MakePool, pools: dict[str, dict[str, Any]]) -> None:
    whole, pool = make_pool(pools["endless"]).take(3), make_pool(pools["endless"])
    assert pool.draw(1) + pool.draw(2) == [(place, whole[place]) for place in range(3)]


def test_a_state_with_the_rank_of_an_older_checkpoint_is_read(
    make_pool: MakePool, pools: dict[str, dict[str, Any]]
) -> None:
    whole, pool = make_pool(pools["endless"]).take(6), make_pool(pools["endless"])
    pool.load_state({**pool.state(), "rank": 0, "world_size": 1, "taken": 4})
    assert pool.take(2) == whole[4:]


def test_taking_nothing_and_less(make_pool: MakePool, pools: dict[str, dict[str, Any]]) -> None:
    pool = make_pool(pools["endless"])
    assert pool.take(0) == []
    with pytest.raises(ValueError, match="cannot take -1 problems"):
        pool.take(-1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12))
def test_problems_that_do_not_fit_are_passed_over(
    make_pool: MakePool, pools: dict[str, dict[str, Any]], each: int, cut: int
) -> None:
    """The walk without them, wherever it was resumed, and a count of them."""

    def fits(problem: Problem) -> bool:
        return problem.gold not in ("1", "4")

    whole = [problem for problem in make_pool(pools["records"]).take(60) if fits(problem)]
    pool, resumed = (make_pool(pools["records"]) for _ in range(2))
    for one in (pool, resumed):
        one.keep(fits)
    assert pool.take(each) == whole[:each]
    resumed.load_state(json.loads(json.dumps(pool.state())))
    assert resumed.take(cut) == whole[each : each + cut] == pool.take(cut)
    assert pool.passed_over == pool.state()["taken"] - each - cut


def test_a_pool_of_which_nothing_fits_says_so(make_pool: MakePool, pools: dict[str, dict[str, Any]]) -> None:
    for kind in ("records", "endless"):
        pool = make_pool(pools[kind])
        pool.keep(lambda problem: False)
        with pytest.raises(UserError, match=r"none of \d+ problems in a row fits the model's context"):
            pool.take(1)


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
        if not isinstance(TASKS[task_type], SandboxTask):
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


def shepherd(problem: str, *steps: tuple[str, str]) -> dict[str, str]:
    text = "".join(f" Step {n}: {step} TAG" for n, (step, _) in enumerate(steps, start=1))
    labelled = text
    for _, label in steps:
        labelled = labelled.replace("TAG", label, 1)
    return {"input": problem + text.replace("TAG", "ки"), "label": problem + labelled, "task": "MATH"}


RECORDS = [
    shepherd("Sum: 4+7+2", ("4+7=11", "+"), ("11+2=13", "+")),
    shepherd("Sum: 4+7+2", ("4+7=11", "+"), ("11+2=14", "-"), ("It is 14.", "-")),
    shepherd("Sum: 1+2", ("1+2=3", "+")),
    shepherd("Sum: 5+5", ("5+5=10", "+")),
    # The same step labelled otherwise: nobody knows.
    shepherd("Sum: 5+5", ("5+5=10", "-")),
]


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "shepherd.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS))
    return {"type": "prm", "source": "math_shepherd", "math_shepherd": str(path)}


def problems(pool: Pool) -> list[Problem]:
    assert pool.order.size is not None
    return sorted(map(pool.order.at, range(pool.order.size)), key=lambda problem: problem.id)


def test_each_labelled_step_is_one_problem(make_pool: MakePool, table: dict[str, Any]) -> None:
    found = problems(make_pool(table))
    shown = [(one.task_type, one.question.split("## Problem\n")[1], one.gold, one.metadata["step"]) for one in found]
    assert shown == [
        ("prm_step", "Sum: 4+7+2\n\n## Steps\n1. 4+7=11", "+", 1),
        ("prm_step", "Sum: 4+7+2\n\n## Steps\n1. 4+7=11\n2. 11+2=13", "+", 2),
        ("prm_step", "Sum: 4+7+2\n\n## Steps\n1. 4+7=11\n2. 11+2=14", "-", 2),
        ("prm_step", "Sum: 1+2\n\n## Steps\n1. 1+2=3", "+", 1),
    ]
    assert str(found[0].metadata["where"]).endswith("shepherd.jsonl:1")
    # In another order each epoch, the same one for the same seed.
    assert [one.id for one in make_pool(table).take(8)] == [one.id for one in make_pool(table).take(8)]
    assert make_pool(table).order.fingerprint != make_pool({**table, "task_type": "prm_solution"}).order.fingerprint


def test_each_scored_solution_is_one_problem(make_pool: MakePool, table: dict[str, Any]) -> None:
    found = problems(make_pool({**table, "task_type": "prm_solution"}))
    assert [(one.gold, one.metadata["step"]) for one in found] == [("1", 2), ("0", 2), ("1", 1)]
    assert found[1].question.endswith("1. 4+7=11\n2. 11+2=14")


def test_a_part_of_the_split_and_of_the_problems(make_pool: MakePool, table: dict[str, Any]) -> None:
    assert len(problems(make_pool({**table, "split": "train[:1]"}))) == 2
    assert len(problems(make_pool({**table, "max_examples": 3}))) == 3


def test_a_source_in_a_mixture(make_pool: MakePool, table: dict[str, Any]) -> None:
    sources = [
        {**table, "name": "steps", "weight": 1.0},
        {"type": "generated", "task_type": "sort", "name": "sort", "weight": 1.0},
    ]
    taken = make_pool({"type": "mixture", "sources": sources}).take(40)
    assert {problem.task_type for problem in taken} == {"prm_step", "sort"}


def test_solutions_without_a_score(make_pool: MakePool, tmp_path: Path) -> None:
    """Where the first of two steps has no label, the second is a problem and the whole is none."""
    path = tmp_path / "stepwise.jsonl"
    step = {"completions": [{"text": "1+2=3", "rating": None, "flagged": False}], "human_completion": None}
    second = {"completions": [{"text": "It is 3.", "rating": 1, "flagged": False}], "human_completion": None}
    record = {
        "is_quality_control_question": False,
        "is_initial_screening_question": False,
        "question": {"problem": "Sum: 1+2"},
        "label": {
            "steps": [{**step, "chosen_completion": 0}, {**second, "chosen_completion": 0}],
            "finish_reason": "solution",
        },
    }
    path.write_text(json.dumps(record) + "\n")
    table = {"type": "prm", "source": "prm800k", "prm800k": str(path)}
    assert [(one.gold, one.metadata["step"]) for one in problems(make_pool(table))] == [("+", 2)]
    with pytest.raises(UserError, match="no solution whose steps all have labels"):
        make_pool({**table, "task_type": "prm_solution"})
