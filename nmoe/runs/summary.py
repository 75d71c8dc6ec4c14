"""The closing summary of a run: what changed, how long it took, where it lies, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.parsing import json_of
from nmoe.runs.answers import how_ended
from nmoe.runs.ledger import decisive_results, probe_values, read_lines
from nmoe.runs.record import interval_of

# Metrics of progress, for the summary of a run without evaluations.
_PROGRESS = ("reward_mean", "correctness", "held_out_loss", "held_out_accuracy", "loss")
_ENDS_STEPS = 10


def ends_of(steps: int) -> int:
    """How many first and last steps of a run are compared: ten, and of a run shorter than forty a quarter of them. A mean over more
    would hide what changed between its ends."""
    return max(1, min(_ENDS_STEPS, steps // 4))


NEXT = {
    "pretrain": ("nmoe chat {run}", "nmoe rl train CONFIG --model.path={run}"),
    "sft": ("nmoe eval {run} ENVIRONMENT --format-check", "nmoe chat {run}"),
    "dpo": ("nmoe eval {run} ENVIRONMENT", "nmoe chat {run}"),
    "reward": ("nmoe eval POLICY ENVIRONMENT --samples 8 --temperature 1 --best-of {run}",),
    "rl": ("nmoe chat {run}", "nmoe export {run} DIRECTORY"),
    "verifier": ("nmoe eval POLICY ENVIRONMENT --samples 8 --temperature 1 --best-of {run}",),
    "selfplay": ("nmoe data show {run}/proof_verifier_train.jsonl --kind text --column text=proof",),
}
"""The commands that a run of a verb leads to."""


def run_summary(run: Path, verb: str) -> Iterator[str]:
    """Lines about the run in the directory. Raises UserError for records that cannot be read."""
    metrics = read_lines(run / "metrics.jsonl")
    changes = list(_evaluated(run / "eval")) or list(_measured(metrics))
    yield from changes
    if metrics:
        seconds = sum(row.get("time_step_s", 0.0) for row in metrics)
        tokens = sum(row.get("tokens_in_batch", 0.0) for row in metrics)
        trained = f", {tokens:,.0f} tokens" if tokens else ""
        yield f"{len(metrics):,} steps in {_duration(seconds)}{trained}"
    best = run / "checkpoints" / "best"
    yield f"run: {run}" + (f"; best checkpoint: {best}" if best.exists() else "")
    following = [command.format(run=run) for command in (*NEXT[verb], "nmoe report {run}")]
    yield "next: " + "  or  ".join(following)


def headline(evaluations: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> str:
    """The result of a run in one line: `greedy_pass@1 on sort: 12.0% at step 0 -> 95.0% [91.0%, 97.3%] of 200 at step 40`.

    It is that of the decisive evaluation, with the highest value where that is not the last. Without evaluations it is the first
    metric of progress that there is, and "" for a run without steps.
    """
    results = decisive_results(evaluations)
    if not results:
        return next(_measured(metrics), "")
    (first, before), (last, after) = next(iter(results.items())), next(reversed(results.items()))
    values = {step: value for step, value in probe_values(evaluations).items() if step > 0} or {last: 0.0}
    best = max(values, key=lambda step: (values[step], step))
    since = "" if first == last else f"{_value(before)} at step {first} -> "
    form = ".4g" if after.get("lower_is_better") else ".1%"
    interval = interval_of(after)
    between = f" [{interval.low:{form}}, {interval.high:{form}}]" if interval else ""
    now = f"{_value(after)}{between} of {after['problems']:,} at step {last}"
    ended = f", {ended}" if (ended := how_ended(after)) else ""
    highest = "" if best in (first, last) else f"; best {_value(results[best])} at step {best}"
    return f"{after['mode']} on {after['dataset']}: {since}{now}{ended}{highest}"


def _evaluated(directory: Path) -> Iterator[str]:
    """The first and the last evaluation of each kind."""
    records = [json_of(path.read_text()) for path in sorted(directory.glob("step_*.json"))]
    if not records:
        return
    first = {(result["mode"], result["dataset"]): result for result in records[0]["results"]}
    for result in records[-1]["results"]:
        before = first.get((result["mode"], result["dataset"]))
        since = "" if before is None or len(records) == 1 else f"{_value(before)} -> "
        ended = f", {ended}" if (ended := how_ended(result)) else ""
        yield f"{result['mode']} on {result['dataset']}: {since}{_value(result)} of {result['problems']:,}{ended}"


def _value(result: Mapping[str, Any]) -> str:
    value: float = result["value"]
    return f"{value:.4g}" if result.get("lower_is_better") else f"{value:.1%}"


def _measured(metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The first metric of progress that the run has, at its first and last steps."""
    for name in _PROGRESS:
        if values := [row[name] for row in metrics if name in row]:
            count = ends_of(len(values))
            first, last = (sum(part) / count for part in (values[:count], values[-count:]))
            steps = "step" if count == 1 else f"{count} steps"
            yield f"{name}: {first:.4g} -> {last:.4g} (first and last {steps})"
            return


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"
