"""The report of the speedrun from nothing: what changed, how, and at what cost, on one page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.eval.evaluate import Evaluation
from nmoe.runs.report import markdown_table
from nmoe.speedrun.report import agreement, before_and_after, cost, curves, which_checkpoint, write_report
from nmoe.speedrun.scratch_examination import Examination
from nmoe.speedrun.stages import StageRecord
from nmoe.statistics import paired_difference


def write_scratch_report(
    out: Path,
    course: str,
    summary: Mapping[str, float | int],
    stages: Sequence[StageRecord],
    metrics: Sequence[Mapping[str, Any]],
    before: Examination,
    after: Examination,
) -> Path:
    """Writes `out/report.md` and `out/plots/*.png`, and returns the path of the report. `course` says how the base became the
    trained model."""
    gain = paired_difference(before.outcomes, after.outcomes)
    parts = [
        f"# Speedrun, seed {summary['seed']}\n",
        f"A small mixture-of-experts base, pretrained on a corpus that knows three skills badly, then {course}. "
        "Problems are held out: no stage met any of them. "
        "Longer ones have a digit more than any that reinforcement learning trained on; the base has met their length, not their "
        "questions. Brackets are 95% intervals.\n",
        "## What was learned\n",
        markdown_table(["skill", "mode", "base", "trained"], _rows(before, after)),
        f"On the same problems, sampled, the trained model is right {100 * gain.value:.1f} points more often "
        f"[{100 * gain.interval.low:.1f}, {100 * gain.interval.high:.1f}], paired.\n",
        *([f"{examined}\n"] if (examined := which_checkpoint(after.step, len(metrics))) else []),
        f"In the required format: {before.format_ok:.1%} before, {after.format_ok:.1%} after "
        f"(longer problems: {before.longer_format_ok:.1%}, {after.longer_format_ok:.1%}). "
        f"Response length: {before.response_tokens:.1f} tokens before, {after.response_tokens:.1f} after.\n",
        "Greedy and pass@16 stand beside the sampled rate because part of any gain is sharpening: what pass@16 of the base "
        "already reaches was there to be found, what greedy gains was not yet preferred.\n",
        "## How\n",
        *curves(out, metrics),
        "## Before and after\n",
        *before_and_after(before.transcripts, after.transcripts),
        "## Engine against learner\n",
        agreement(summary, f"{summary.get('route_flips', 0):.0f} router picks came out differently."),
        "## Time and cost\n",
        *cost(out, summary, stages, metrics),
    ]
    return write_report(out, parts)


def _rows(before: Examination, after: Examination) -> list[list[str]]:
    rows = []
    for name, base, trained in (
        ("sampled at temperature 1", before.sampled, after.sampled),
        ("greedy", before.greedy, after.greedy),
        ("pass@16", before.pass16, after.pass16),
        ("longer problems, sampled", before.longer, after.longer),
        ("longer problems, greedy", before.longer_greedy, after.longer_greedy),
    ):
        for one, other in zip(base, trained, strict=True):
            skill = one.dataset.partition("/")[2] or f"**all** ({one.problems} problems)"
            rows.append([skill, name, _shown(one), _shown(other)])
    return rows


def _shown(evaluation: Evaluation) -> str:
    return f"{evaluation.value:.1%} [{evaluation.low:.1%}, {evaluation.high:.1%}]"
