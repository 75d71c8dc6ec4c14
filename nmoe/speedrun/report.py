"""The speedrun's report: what changed, how, and at what cost, on one page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.eval.evaluate import Evaluation
from nmoe.runs.plots import plot_curves
from nmoe.runs.recorded import read_provenance
from nmoe.runs.report import fenced, markdown_table, markdown_text
from nmoe.runs.storage import storage_errors, write_atomically
from nmoe.speedrun.examination import Examination
from nmoe.speedrun.stages import StageRecord
from nmoe.statistics import paired_difference

# The names of the first are the skills that the run had.
_PLOTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("correctness", "Correctness by skill", "share of responses", ()),
    ("reward", "Reward, format and reasoning", "mean per response", ("reward_mean", "format_ok", "reasoning_ok")),
    ("length", "Response length", "tokens", ("response_length_mean",)),
    ("entropy", "Entropy of the policy", "nats per token", ("entropy_mean",)),
    ("mismatch", "Engine against learner", "nats", ("mismatch_abs_mean", "mismatch_abs_max")),
)


def write_speedrun_report(
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
    with storage_errors(out):
        (out / "plots").mkdir(exist_ok=True)
    pictures = []
    for name, title, ylabel, names in _PLOTS:
        if name == "correctness":
            names = tuple(sorted({key for row in metrics for key in row if key.startswith("correctness/")}))
        path = plot_curves(metrics, names, out / "plots" / f"{name}.png", title, ylabel, log=name == "mismatch")
        if path is not None:
            pictures.append(f"![{title}]({path.relative_to(out)})\n")
    provenance = read_provenance(out / "rl")
    gain = paired_difference(before.outcomes, after.outcomes)
    sampled_tokens = sum(row["time_rollout_s"] * row["tokens_per_second"] for row in metrics)
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
        *([f"{examined}\n"] if (examined := which_checkpoint(after, len(metrics))) else []),
        f"In the required format: {before.format_ok:.1%} before, {after.format_ok:.1%} after "
        f"(longer problems: {before.longer_format_ok:.1%}, {after.longer_format_ok:.1%}). "
        f"Response length: {before.response_tokens:.1f} tokens before, {after.response_tokens:.1f} after.\n",
        "Greedy and pass@16 stand beside the sampled rate because part of any gain is sharpening: what pass@16 of the base "
        "already reaches was there to be found, what greedy gains was not yet preferred.\n",
        "## How\n",
        *pictures,
        "## Before and after\n",
        *_transcripts(before, after),
        "## Engine against learner\n",
        f"The engine's log-probabilities were recomputed by the learner on every step: mean difference at most "
        f"{summary['mismatch_abs_mean']:.1e}, largest {summary['mismatch_abs_max']:.1e} nats over {len(metrics)} steps; "
        f"{summary['route_flips']:.0f} router picks came out differently.\n",
        "## Time and cost\n",
        markdown_table(
            ["stage", "what it came to", "seconds"],
            [[stage.name, _figures(stage), round(stage.seconds, 1)] for stage in stages],
        ),
        f"{summary['wall_s'] / 60:.1f} minutes in all, {summary['cpu_s'] / 60:.1f} core-minutes, "
        f"{summary['peak_memory_mb']:.0f} MB of memory at most; {sampled_tokens:,.0f} tokens were sampled to learn from. "
        f"On {provenance['cpu']}, {provenance['threads']} threads, torch {provenance['torch']}.\n",
    ]
    report = out / "report.md"
    write_atomically(report, "\n".join(parts).encode())
    return report


def which_checkpoint(after: Examination, steps: int) -> str:
    """Which checkpoint of reinforcement learning was examined as the trained model; nothing where that was not noted."""
    if after.step is None:
        return ""
    return (
        f"The trained model is the checkpoint that solved the most validation problems, that of step {after.step} of {steps}: "
        "the last one may solve fewer."
    )


def _figures(stage: StageRecord) -> str:
    shown = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.3g}"
        for name, value in stage.figures.items()
    ]
    if stage.attempts > 1:
        shown.append(f"attempt {stage.attempts}, whose seconds these are")
    return ", ".join(shown)


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


def _transcripts(before: Examination, after: Examination) -> list[str]:
    parts = []
    for base, trained in zip(before.transcripts, after.transcripts, strict=True):
        parts.append(f"**{markdown_text(base.question)}** (gold: {markdown_text(base.gold)})\n")
        for who, transcript in (("base", base), ("trained", trained)):
            verdict = "correct" if transcript.correct else "wrong"
            why = transcript.reason and f" ({markdown_text(transcript.reason)})"
            parts.append(f"{who}, {verdict}{why}:\n\n{fenced(transcript.text, 'text')}")
    return parts
