"""The promises of a speedrun, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nmoe.eval.evaluate import Evaluation
from nmoe.speedrun.promises import SCRATCH_PROMISES, shortfalls
from nmoe.speedrun.report import Transcript, reason
from nmoe.speedrun.scratch_report import Examination, write_scratch_report
from nmoe.types import Failure, Grade, Verdict

KEPT: dict[str, float | int] = {
    "base_correctness": 0.2,
    "trained_correctness": 0.95,
    "correctness_trained_add": 0.9,
    "correctness_trained_reverse": 0.99,
    "correctness_trained_sort": 0.96,
    "format_ok": 0.998,
    "mismatch_abs_mean": 0.0,
    "mismatch_abs_max": 9.5e-7,
    "first_step_ppo_kl": 0.0,
}


def test_all_kept() -> None:
    assert KEPT.keys() == {promise.figure for promise in SCRATCH_PROMISES}
    assert shortfalls(SCRATCH_PROMISES, KEPT, "runs/x") == []


def test_every_shortfall_says_what_was_promised_and_what_to_do() -> None:
    lines = shortfalls(
        SCRATCH_PROMISES, KEPT | {"trained_correctness": 0.727, "correctness_trained_reverse": 0.296}, "runs/x"
    )
    assert [line.split(":")[0] for line in lines] == [
        "trained_correctness = 0.727, promised 0.9 to 1",
        "correctness_trained_reverse = 0.296, promised 0.75 to 1",
    ]
    assert all("try another seed with --seed" in line and "runs/x/report.md" in line for line in lines)


def test_a_base_too_good_a_mismatch_and_a_figure_that_is_none_are_shortfalls() -> None:
    for figure, value in (
        ("base_correctness", 0.36),
        ("mismatch_abs_mean", 1.1e-6),
        ("first_step_ppo_kl", -0.1),
        ("format_ok", float("nan")),
    ):
        assert len(shortfalls(SCRATCH_PROMISES, KEPT | {figure: value}, "runs/x")) == 1
    assert (
        len(
            shortfalls(SCRATCH_PROMISES, {name: value for name, value in KEPT.items() if name != "format_ok"}, "runs/x")
        )
        == 1
    )


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
    assert "checkpoint that solved the most validation problems, from step 2 of 3: the last one may" in text
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
