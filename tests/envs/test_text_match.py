"""Plain text as the answer, and CSV files as pools."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nmoe.config.tables.pools import CsvPool, JsonlPool
from nmoe.envs.pools import Shard, build_pool
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.errors import UserError
from nmoe.types import Problem


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("Paris", "paris.", True),
        ("New York", " new\n york ", True),
        ("New York", "newyork", False),
        ("Paris", "It is Paris", False),
        ("1/2", "0.5", False),
        ("ﬁve", "FIVE", True),
        ("U.S.", "u.s", True),
        ("", "", False),
    ],
)
def test_text_is_compared_as_text(gold: str, answer: str, right: bool) -> None:
    task, problem = TASKS["text_match"], Problem("p/0", "text_match", "?", gold, "p")
    if not gold:
        with pytest.raises(UserError, match="nothing is left of the gold answer ''"):
            task.check_gold(problem)
        return
    task.check_gold(problem)
    verdict = asyncio.run(task.verify(problem, Attempt(answer)))
    assert verdict.outcome == ("correct" if right else "incorrect")


def test_a_csv_is_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "capitals.csv"
    path.write_text('question,answer\n"Capital of France, in one word?",Paris\nCapital of Peru?,Lima\n')
    pool = build_pool("capitals", CsvPool(type="csv", path=str(path), task_type="text_match"), Shard())
    assert {(one.question, one.gold) for one in pool.take(2)} == {
        ("Capital of France, in one word?", "Paris"),
        ("Capital of Peru?", "Lima"),
    }


def test_a_csv_as_jsonl_is_called_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "capitals.csv"
    path.write_text("question,answer\nCapital of Peru?,Lima\n")
    with pytest.raises(UserError, match=r'capitals\.csv: a csv file, and jsonl is wanted here; write type = "csv"'):
        build_pool("capitals", JsonlPool(type="jsonl", path=str(path), task_type="text_match"), Shard())


def test_records_without_an_answer_are_told_of_open_problems(tmp_path: Path) -> None:
    path = tmp_path / "essays.jsonl"
    path.write_text('{"question": "Write about rain."}\n')
    with pytest.raises(
        UserError, match='set answer_field to one of them, or task_type = "open" where no answer is the'
    ):
        build_pool("essays", JsonlPool(type="jsonl", path=str(path), task_type="text_match"), Shard())
