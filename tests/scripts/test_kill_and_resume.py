"""Runs that are killed at random moments: a short form of scripts/kill_and_resume.py, and that it would see a difference."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from kill_and_resume import Experiment, left, leftovers
from same_numbers import timeless

SHORT = (
    "--run.steps=4",
    "--batch.prompts_per_step=2",
    "--batch.group_size=3",
    "--eval.0.every_steps=2",
    "--eval.0.problems=5",
)


def test_killed_runs_end_as_if_nothing_had_happened(base: Path, workshop: Path, tmp_path: Path) -> None:
    overrides = [*SHORT, "--run.directory=.", "--checkpoint.every_steps=1"]
    # A seed whose kills strike early: a run that is killed in its last save may have nothing left to do.
    experiment = Experiment(tmp_path, str(workshop / "rl.toml"), overrides, seed=12)
    for phase in ("save", "step"):
        kill = experiment.kill_and_resume(phase)
        assert kill.differences == (), kill
        assert kill.resumed_from < 4
    # It compares what it should: a number of a step, a step that is there twice, a weight, and half a write.
    run = tmp_path / "rl_01"
    same = left(run)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    first = json.loads(rows[0])
    (run / "metrics.jsonl").write_text("".join([json.dumps(first | {"reward_mean": 9.0}) + "\n", *rows[1:], rows[-1]]))
    weights = run / "checkpoints/latest/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    now = left(run)
    assert {name for name in same if same[name] != now[name]} == {
        "steps",
        "step 1",
        "checkpoints/latest/model.safetensors",
    }
    shutil.copytree(run / "checkpoints/step_000004", run / "checkpoints/.step_000004.partial")
    assert "checkpoints/.step_000004.partial" in leftovers(run, tmp_path / "rl_whole", tmp_path / "workspaces")


def test_times_are_left_out() -> None:
    record = {"made_utc": "now", "tools": [{"name": "python", "wall_s": 0.1, "output": "4"}], "answers": 3}
    assert timeless(record) == {"tools": [{"name": "python", "output": "4"}], "answers": 3}
