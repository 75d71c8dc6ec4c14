"""The pool of labelled steps: what becomes a problem, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe.envs.pools import Pool
from nmoe.errors import UserError
from nmoe.types import Problem

MakePool = Callable[..., Pool]


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
