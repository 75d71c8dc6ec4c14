"""Comparisons of runs: differences that same_numbers.py prints, and a short form of kill_and_resume.py."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from kill_and_resume import Experiment, left, leftovers
from same_numbers import Figures, compared, differences, read, timeless


def test_only_timings_may_differ() -> None:
    before = [{"step": 1, "loss": 0.5, "time_step_s": 1.0, "tokens_per_second": 9.0}]
    assert list(differences(before, [before[0] | {"time_step_s": 2.0, "tokens_per_second": 8.0}])) == []
    assert list(differences(before, [before[0] | {"loss": 0.5 + 1e-12}])) == [
        "loss: 0.5 before, 0.500000000001 after, at step 1"
    ]


def test_every_key_is_named_once_with_its_first_step() -> None:
    before = [{"step": 1, "a": 1, "b": 1}, {"step": 2, "a": 1, "b": 1}, {"step": 3, "a": 1, "b": 1}]
    after = [{"step": 1, "a": 1, "b": 1}, {"step": 2, "a": 2, "c": 1}]
    assert list(differences(before, after)) == [
        "3 steps before, 2 after",
        "a: 1 before, 2 after, at step 2",
        "b: 1 before, absent after, at step 2",
        "c: absent before, 1 after, at step 2",
    ]


def test_metrics_and_files_of_a_run_are_compared(tmp_path: Path) -> None:
    def figures(name: str, loss: float, time: float, answer: str, weights: bytes) -> Figures:
        run = tmp_path / name
        for directory in ("samples", "checkpoints/latest/critic"):
            (run / directory).mkdir(parents=True)
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "time_step_s": time}) + "\n")
        record = {"answer": answer, "tools": [{"name": "python", "wall_s": time}]}
        (run / "samples/step_000001.jsonl").write_text(json.dumps(record) + "\n")
        (run / "checkpoints/latest/critic/model.safetensors").write_bytes(weights)
        return Figures.read(run)

    before = figures("before", 0.5, 1.0, "103", b"w")
    again = figures("again", 0.5, 2.0, "103", b"w")
    assert again == before, "but for times"
    assert again.line("grpo").split() == before.line("grpo").split()
    assert list(compared({"grpo": before}, {"grpo": again, "base": again})) == []
    after = figures("after", 0.25, 1.0, "301", b"x")
    assert list(compared({"grpo": before, "dpo": before}, {"grpo": after})) == [
        "grpo: loss: 0.5 before, 0.25 after, at step 1",
        "grpo: checkpoints/latest/critic/model.safetensors is another",
        "grpo: samples/step_000001.jsonl is another",
    ]
    kept = tmp_path / "figures.json"
    kept.write_text(json.dumps({"grpo": asdict(before)}))
    assert read(kept) == {"grpo": before}


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
