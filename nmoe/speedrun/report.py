"""Sections that the reports of both speedruns share: curves, examples before and after training, time and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.runs.charts import missing, plot_curves
from nmoe.runs.provenance import read_provenance
from nmoe.runs.report import fenced, markdown_table, markdown_text
from nmoe.runs.storage import storage_errors, write_atomically
from nmoe.speedrun.stages import StageRecord
from nmoe.types import Grade

# The names of the first are the skills that the run had.
_PLOTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("correctness", "Correctness by skill", "share of responses", ()),
    ("reward", "Reward, format and reasoning", "mean per response", ("reward_mean", "format_ok", "reasoning_ok")),
    ("length", "Response length", "tokens", ("response_length_mean",)),
    ("entropy", "Entropy of the policy", "nats per token", ("entropy_mean",)),
    ("mismatch", "Engine against learner", "nats", ("mismatch_abs_mean", "mismatch_abs_max")),
)


@dataclass(frozen=True)
class Transcript:
    """A problem and a model's completion of it, control tokens included, with its verdict.

    `reason` explains the verdict; it is empty in results of older versions.
    """

    question: str
    gold: str
    text: str
    correct: bool
    reason: str = ""


def reason(grade: Grade) -> str:
    """Returns why a completion is right or wrong, in a few words."""
    if grade.verdict is not None:
        return grade.verdict.reason
    if grade.failure == "truncated":
        return "cut off at the token limit"
    return "not in the required format, so that no answer counts"


def which_checkpoint(step: int | None, steps: int) -> str:
    """Returns a sentence that names the evaluated checkpoint of the run; "" if its step is unknown."""
    if step is None:
        return ""
    best = f"The trained model is the checkpoint that solved the most validation problems, from step {step} of {steps}"
    return f"{best}." if step == steps else f"{best}: the last one may solve fewer."


def curves(out: Path, metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Draws the metrics of the run into `out/plots/*.png`, and returns the lines of Markdown that show them; without matplotlib, a
    line that says how to get it."""
    if line := missing():
        return [f"{line}\n"]
    with storage_errors(out):
        (out / "plots").mkdir(exist_ok=True)
    pictures = []
    for name, title, ylabel, names in _PLOTS:
        if name == "correctness":
            names = tuple(sorted({key for row in metrics for key in row if key.startswith("correctness/")}))
            names = names or ("correctness",)
        if name == "reward" and not any(row.get("reasoning_ok") for row in metrics):  # it asks for none
            title, names = "Reward and format", ("reward_mean", "format_ok")
        path = plot_curves(metrics, names, out / "plots" / f"{name}.png", title, ylabel, log=name == "mismatch")
        if path is not None:
            pictures.append(f"![{title}]({path.relative_to(out)})\n")
    return pictures


def before_and_after(before: Sequence[Transcript], after: Sequence[Transcript]) -> list[str]:
    """Returns the paragraphs that show the same problems answered by the base model and by the trained model."""
    parts = []
    for base, trained in zip(before, after, strict=True):
        gold = f" (gold: {markdown_text(base.gold)})" if base.gold else ""
        parts.append(f"**{markdown_text(base.question)}**{gold}\n")
        for who, transcript in (("base", base), ("trained", trained)):
            verdict = "correct" if transcript.correct else "wrong"
            why = transcript.reason and f" ({markdown_text(transcript.reason)})"
            parts.append(f"{who}, {verdict}{why}:\n\n{fenced(transcript.text, 'text')}")
    return parts


def agreement(summary: Mapping[str, float | int], more: str) -> str:
    """Returns a paragraph on the agreement of the engine's and the learner's log-probabilities, followed by the text `more`."""
    if "mismatch_abs_mean" not in summary:
        return f"None of the {summary['rl_steps']} steps updated the policy, so nothing was compared.\n"
    return (
        "The engine samples and the learner trains: two programs over the same weights. Each computes the log-probability of every "
        "sampled token, and apart from rounding both should be the same. On every step they were compared: mean difference at most "
        f"{summary['mismatch_abs_mean']:.1e}, largest {summary['mismatch_abs_max']:.1e} nats over {summary['rl_steps']} steps. "
        f"{more}\n"
    )


def cost(
    out: Path, summary: Mapping[str, float | int], stages: Sequence[StageRecord], metrics: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Returns a table of the stages with their times, and a line on total time, memory and hardware."""
    provenance = read_provenance(out / "rl")
    sampled_tokens = sum(row["time_rollout_s"] * row["tokens_per_second"] for row in metrics)
    return [
        stage_table(stages),
        f"{summary['wall_s'] / 60:.1f} minutes in all, {summary['cpu_s'] / 60:.1f} CPU minutes, "
        f"{summary['peak_memory_mb']:.0f} MB of memory at most; {sampled_tokens:,.0f} tokens were sampled to learn from. "
        f"On {provenance['cpu']}, {_threads(provenance['threads'])}, torch {provenance['torch']}.\n",
    ]


def stage_table(stages: Sequence[StageRecord]) -> str:
    """Returns a table of the stages with their figures and times."""
    rows = [[stage.name, _figures(stage), round(stage.seconds, 1)] for stage in stages]
    return markdown_table(["stage", "result", "seconds"], rows)


def write_report(out: Path, parts: Sequence[str]) -> Path:
    """Joins the paragraphs into `out/report.md`, and returns its path."""
    report = out / "report.md"
    write_atomically(report, "\n".join(parts).encode())
    return report


def _figures(stage: StageRecord) -> str:
    shown = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.3g}"
        for name, value in stage.figures.items()
    ]
    if stage.attempts > 1:
        shown.append(f"attempt {stage.attempts}, whose seconds these are")
    return "; ".join(shown)


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"
