"""What a run says at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe.runs.summary import NEXT, run_summary


def evaluation(run: Path, step: int, value: float, **more: Any) -> None:
    result = {"mode": "greedy_pass@1", "dataset": "sort", "problems": 200, "value": value, "low": 0.0, "high": 1.0}
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval" / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "results": [result | more]}))


def metrics(run: Path, **values: float) -> None:
    rows = [{"step": step, "time_step_s": 6.0, "tokens_in_batch": 1000.0} | values for step in range(1, 41)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_changed_what_it_took_where_it_lies_and_what_is_next(tmp_path: Path) -> None:
    metrics(tmp_path)
    for step, value in ((0, 0.12), (20, 0.5), (40, 0.95)):
        evaluation(tmp_path, step, value)
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    assert list(run_summary(tmp_path, "rl")) == [
        "greedy_pass@1 on sort: 12.0% -> 95.0% of 200",
        "40 steps in 4.0 minutes, 40,000 tokens",
        f"run: {tmp_path}; best checkpoint: {tmp_path}/checkpoints/best",
        f"next: nmoe chat {tmp_path}  or  nmoe export {tmp_path} DIRECTORY  or  nmoe report {tmp_path}",
    ]


def test_losses_are_no_percentages_and_one_evaluation_has_no_before(tmp_path: Path) -> None:
    evaluation(tmp_path, 5, 0.4321, mode="held_out_loss", lower_is_better=True)
    assert next(iter(run_summary(tmp_path, "sft"))) == "held_out_loss on sort: 0.4321 of 200"


def test_without_evaluations_the_metrics_speak(tmp_path: Path) -> None:
    rows = [{"step": step, "time_step_s": 1.0, "loss": float(21 - step)} for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(run_summary(tmp_path, "pretrain"))[:2] == [
        "loss: 18 -> 3 (first and last 5 steps)",
        "20 steps in 20 s",
    ]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (12, "loss: 11 -> 2 (first and last 3 steps)"),  # 12, 11 and 10, and 3, 2 and 1
        (60, "loss: 55.5 -> 5.5 (first and last 10 steps)"),
        (3, "loss: 3 -> 1 (first and last step)"),
        (1, "loss: 1 -> 1 (first and last step)"),
    ],
)
def test_the_ends_of_a_short_run_have_no_step_in_common(tmp_path: Path, steps: int, said: str) -> None:
    """The loss falls by one a step, to 1."""
    rows = [{"step": step, "time_step_s": 1.0, "loss": float(steps + 1 - step)} for step in range(1, steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert next(run_summary(tmp_path, "sft")) == said


def test_every_verb_leads_somewhere(tmp_path: Path) -> None:
    for verb in NEXT:
        *_, last = run_summary(tmp_path, verb)
        assert last.startswith("next: nmoe ")
        assert last.endswith(f"nmoe report {tmp_path}")
