"""Sinks under the run loop: after a kill and a resumption they hold what metrics.jsonl holds, and one that is down is recorded."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_run_loop import Counting

from nmoe.config.commands import RunConfig
from nmoe.errors import UserError
from nmoe.recipes.run_loop import Step, open_run
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.runs.report import write_report


class Killed(Counting):
    """Counts, and is killed in its step 6, where the checkpoint is at 4."""

    def step(self, step: int) -> Step:
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(step)


def follow(directory: Path, recipe: Counting, sinks: list[str], resume: bool = False, **more: str) -> Path:
    tables: dict[str, Any] = {
        "run": {"name": "counts", "directory": str(directory), "steps": 9, "resume": resume},
        "model": {"path": "nowhere"},
        "checkpoint": {"every_steps": 4},
        "sinks": {"to": sinks, **more},
    }
    with open_run(RunConfig.model_validate(tables), threads=1) as run:
        run.follow(recipe)
    return run.directory.path


def test_a_killed_and_resumed_run_has_the_same_numbers_in_every_file(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "from pathlib import Path; from test_run_sinks import Killed, follow\n"
        f"follow(Path({str(tmp_path)!r}), Killed({{3: 0.5}}, every=3), ['csv', 'tensorboard'])"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "counts")] == [1, 2, 3, 4, 5]
    resumed = Counting({6: 0.1, 9: 0.7}, every=3)
    run = follow(tmp_path, resumed, ["csv", "tensorboard"], resume=True)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 10))
    with (run / "metrics.csv").open(newline="") as file:
        cells = [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    assert cells == [{name: str(value) for name, value in row.items()} for row in rows]
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("sum", "held_out"):
        given = [(row["step"], float(np.float32(row[name]))) for row in rows if name in row]
        assert [(event.step, event.value) for event in events.Scalars(name)] == given
    assert read_lines(run / "alerts.jsonl") == []


def test_a_sink_that_is_down_is_an_alert_at_the_end_and_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("nmoe.runs.sinks.csv_file.CsvSink.write", refuse)
    run = follow(tmp_path, Counting({3: 0.5, 6: 0.6, 9: 0.7}, every=3), ["csv"])
    assert len(read_metrics(run)) == 9
    (alert,) = read_lines(run / "alerts.jsonl")
    message = "sink csv: 9 of 9 records were not written: ConnectionError: no route"
    assert alert == {"step": 9, "message": message}
    assert message in (run / "log.txt").read_text()
    assert message in write_report(run).read_text()


def test_a_sink_without_its_package_ends_the_start_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe.runs.sinks.sinks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'tensorboard>=2\.20'"):
        follow(tmp_path, Counting({}, every=0), ["csv", "tensorboard"])
    assert not (tmp_path / "counts").exists()
