"""What the dashboard's server knows of samples, names and alerts, where files are odd, gone or cannot be written."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from nmoe.dashboard.curves import Metrics
from nmoe.dashboard.export import _chosen
from nmoe.dashboard.index import Index, Query
from nmoe.dashboard.server import application
from nmoe.dashboard.state import State

Record = dict[str, Any]


def graded(problem: str, reward: float, correctness: float | None, outcome: str = "", **more: Any) -> Record:
    """A sample's record; without a correctness, as an open task has it."""
    return {
        "problem": problem, "reward": reward, "weights": {"correctness": 1.0}, "failure": "ok",
        "components": {"format": 1.0} | ({} if correctness is None else {"correctness": correctness}),
        "extras": {"correctness": correctness or 0.0}, "verdict": {"outcome": outcome} if outcome else None, **more,
    }  # fmt: skip


@pytest.fixture
def indexed(tmp_path: Path) -> Callable[..., Index]:
    def indexed(*records: Record) -> Index:
        (tmp_path / "run/samples").mkdir(parents=True)
        text = "".join(json.dumps(one) + "\n" for one in records)
        (tmp_path / "run/samples/step_000001.jsonl").write_text(text)
        index = Index(tmp_path / "run", None)
        index.look()
        index.build(9)
        return index

    return indexed


def test_wrong_and_never_solved_are_said_of_problems_with_a_right_answer(indexed: Callable[..., Index]) -> None:
    index = indexed(
        graded("hacked", 0.9, 0.0, "incorrect"),
        graded("partial", 0.9, 0.9, "incorrect"),
        graded("open", 0.9, None),
        graded("silent", 0.8, 0.0),
        graded("right", 1.0, 1.0, "correct"),
    )
    assert [row["problem"] for row in index.rows(Query({"wrong": 1}, {}, {}), 0, 9)] == ["hacked", "silent"]
    assert [row["problem"] for row in index.problems("never", 9)] == ["hacked", "partial", "silent"]
    assert {row["problem"]: row["solved"] for row in index.problems("mean", 9)} == {
        "hacked": 0, "partial": 0, "open": None, "silent": 0, "right": 1,
    }  # fmt: skip
    totals = index.totals()
    assert (totals["samples"], totals["problems"], totals["never_solved"]) == (5, 4, 3)
    # An exported page says the same of each row, by whatever query it was found.
    assert {row["problem"]: row["wrong"] for row in _chosen(index)} == {
        "hacked": 1, "partial": 0, "open": 0, "silent": 1, "right": 0,
    }  # fmt: skip


def test_records_that_sqlite_does_not_take_are_torn(indexed: Callable[..., Index]) -> None:
    right = graded("right", 1.0, 1.0, "correct")
    changes: list[Record] = [{"group": []}, {"left_out": [1]}, {"index": 2**70}, {"problem": "\ud800"}]
    odd = [right | change for change in changes]
    index = indexed(*odd, right)
    assert index.torn() == [f"step_000001.jsonl:{line}" for line in (1, 2, 3, 4)]
    assert [row["line"] for row in index.rows(Query({}, {}, {}), 0, 9)] == [4]


def test_an_index_whose_file_cannot_be_written_goes_on_in_memory(made: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    index = Index(made / "healthy", cache)
    index.look()
    steps = index.missing
    (file,) = cache.glob("*.sqlite")
    with sqlite3.connect(file) as other:
        other.execute("BEGIN IMMEDIATE")  # another dashboard writes, and does not end
        index.build(99)
    assert (index.missing, index.totals()["steps"]) == (0, steps)
    assert Index(made / "healthy", cache).totals()["steps"] == 0


def test_questions_beyond_the_index_are_answered(made: Path) -> None:
    client = TestClient(application(State([made], None)))
    assert client.get("/data/sample", params={"run": "healthy", "step": 2**70, "line": 0}).status_code == 400
    loads = client.get("/data/load", params={"run": "troubled", "columns": 1}).json()
    assert len(loads["steps"]) == 1


def test_a_run_keeps_its_name_when_another_of_it_comes(made: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("nmoe.dashboard.state._PAGE_S", 0.0)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    shutil.copytree(made / "healthy", second / "one")
    state = State([first, second], None)
    assert {run["name"]: run["path"] for run in state.runs({})["runs"]} == {"one": str(second / "one")}
    shutil.copytree(made / "healthy", first / "one")
    for _ in range(2):
        assert {run["name"]: run["path"] for run in state.runs({})["runs"]} == {
            "one": str(second / "one"), "first/one": str(first / "one"),
        }  # fmt: skip


def test_alerts_that_a_resumed_run_cut_back_are_gone(runs: Path) -> None:
    state = State([runs], None)
    assert state.run({"run": "troubled"})["alerts"]
    (runs / "troubled/alerts.jsonl").write_text("")
    assert state.run({"run": "troubled"})["alerts"] == []


def test_a_save_counts_over_all_steps(tmp_path: Path) -> None:
    rows = [{"step": step, "time_step_s": 5.0, "time_learn_s": 4.0} for step in range(1, 1001)]
    for row in rows[::100]:
        row["time_save_s"] = 10.0
    rows[7]["time_step_s"] = 105.0  # one slow step, which a thinned curve would make weigh more
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = Metrics(tmp_path)
    metrics.read()
    means = metrics.mean_times()
    assert (means["time_save_s"], means["time_learn_s"], means["time_grade_s"]) == (0.1, 4.0, None)
    assert means["time_step_s"] == pytest.approx(5.2)
