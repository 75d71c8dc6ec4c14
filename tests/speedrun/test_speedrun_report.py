"""The speedrun's report: which checkpoint was examined, and why each example was judged as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nmoe.eval.evaluate import Evaluation
from nmoe.speedrun.report import Transcript, reason
from nmoe.speedrun.scratch_examination import Examination
from nmoe.speedrun.scratch_report import write_scratch_report
from nmoe.types import Failure, Grade, Verdict


def examination(step: int | None, transcript: Transcript) -> Examination:
    result = [Evaluation("sampled", "skills", 2, 0.5, 0.0, 1.0)]
    return Examination(result, result, result, result, result, 1.0, 1.0, 9.0, [transcript], [1.0, 0.0], step)


def report(out: Path, step: int | None) -> str:
    (out / "rl").mkdir(exist_ok=True)
    (out / "rl/provenance.json").write_text(json.dumps({"cpu": "a CPU", "threads": 1, "torch": "2", "resumed": []}))
    figures = (
        "mismatch_abs_mean",
        "mismatch_abs_max",
        "route_flips",
        "wall_s",
        "cpu_s",
        "peak_memory_mb",
        "seed",
        "rl_steps",
    )
    metrics = [{"step": at, "time_rollout_s": 1.0, "tokens_per_second": 9.0} for at in (1, 2, 3)]
    wrong = Transcript("2 + 2", "4", "it is 4", False, "not in the required format, so that no answer counts")
    right = Transcript("2 + 2", "4", "4", True)
    before, after = examination(5, wrong), examination(step, right)
    return write_scratch_report(out, "trained", dict.fromkeys(figures, 0), [], metrics, before, after).read_text()


def test_the_report_names_the_checkpoint_and_the_reasons(tmp_path: Path) -> None:
    text = report(tmp_path, 2)
    assert "checkpoint that solved the most validation problems, that of step 2 of 3: the last one may" in text
    assert "base, wrong (not in the required format, so that no answer counts):\n" in text
    assert "trained, correct:\n" in text, "an examination from before there were reasons"
    assert "validation problems" not in report(tmp_path, None)


@pytest.mark.parametrize(
    ("failure", "verdict", "why"),
    [
        ("ok", Verdict.of(False, "exact", "other digits"), "other digits"),
        ("truncated", None, "cut off at the token limit"),
        ("parse_error", None, "not in the required format, so that no answer counts"),
    ],
)
def test_why_a_completion_is_right_or_wrong(failure: Failure, verdict: Verdict | None, why: str) -> None:
    assert reason(Grade(0.0, {}, failure, {}, "4", verdict)) == why
