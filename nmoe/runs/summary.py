"""Summarises runs in lines: `nmoe runs list` and `nmoe runs show`, and the closing summary of a run, which names the next
command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nmoe.config.commands import COMMANDS
from nmoe.config.listing import columns
from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.runs.directory import flat_keys
from nmoe.runs.ledger import decisive_results, probe_values, read_lines
from nmoe.runs.provenance import resumptions
from nmoe.runs.record import RunRecord, find_runs, form_of, read_run, value_of
from nmoe.runs.samples import how_ended

# The first of these that a run has is shown in the list.
_HEADLINES = ("reward_mean", "held_out_loss", "loss")
_LAST_ALERTS = 5


def list_runs(directory: Path) -> Iterator[str]:
    """Yields a line for each run: directory, command, steps, start, last reward or loss, and whether it is running, finished or
    interrupted. For a run that cannot be read the line says why. Raises UserError if there are no runs."""
    rows, broken = [("run", "command", "steps", "started", "last", "status")], []
    for path in find_runs(directory):
        try:
            rows.append(_row(read_run(path)))
        except UserError as error:
            broken.append(f"unreadable: {error}")
    if len(rows) == 1 and not broken:
        raise UserError(f"{directory}: no runs there; name the directory that run.directory says")
    if len(rows) > 1:
        yield from columns(rows)
    yield from broken


def show_run(path: Path) -> Iterator[str]:
    """Yields lines with a run's status and steps, its settings that differ from the defaults, its provenance, its best and last
    evaluations and its last alerts. Raises UserError as `read_run` does."""
    run = read_run(path)
    _, command, steps, started, last, status = _row(run)
    yield f"{run.path}: {command}, {status}, step {steps}, started {started}, {last}"
    yield "configuration (changes from the defaults)"
    yield from columns([(f"  {key}", repr(value)) for key, value in changed_keys(run).items()])
    yield "provenance"
    shown = {key: value for key, value in run.provenance.items() if key not in ("resumed", "argv")}
    shown["command"] = " ".join(run.provenance.get("argv", []))
    yield from columns([(f"  {key}", str(value)) for key, value in shown.items()])
    yield from (f"  resumed {line}" for line in resumptions(run.provenance))
    yield from _evaluations(run)
    if run.alerts:
        yield f"alerts ({len(run.alerts)}; the last {min(len(run.alerts), _LAST_ALERTS)})"
        yield from (f"  step {alert['step']}: {alert['message']}" for alert in run.alerts[-_LAST_ALERTS:])


def changed_keys(run: RunRecord) -> dict[str, Any]:
    """Returns the run's settings that differ from their defaults, by dotted keys; all settings if the command's settings have
    changed since."""
    try:
        given = COMMANDS[run.command].model_validate(run.tables).model_dump(exclude_none=True, exclude_defaults=True)
    except ValidationError:
        return dict(run.config)
    return {key: run.config[key] for key in flat_keys(given) if key in run.config}


def _row(run: RunRecord) -> tuple[str, str, str, str, str, str]:
    steps = f"{run.last_step}/{'?' if run.steps is None else run.steps}"
    last = next((f"{name} {value:.4g}" for name in _HEADLINES if (value := run.last(name)) is not None), "no step yet")
    return str(run.path), run.command, steps, str(run.provenance.get("started_utc", "?")), last, run.status


def _evaluations(run: RunRecord) -> Iterator[str]:
    evaluated = [record for record in run.evaluations if record["results"]]
    if not evaluated:
        return
    yield "evaluations"
    # As the run itself chooses: the step before the first is only the baseline.
    values = probe_values(evaluated)
    candidates = [step for step in values if step > 0] or list(values)
    best = max(candidates, key=lambda step: (values[step], step))
    for title, record in (("best", next(one for one in evaluated if one["step"] == best)), ("last", evaluated[-1])):
        yield from (f"  {title}, step {record['step']}: {result_line(result)}" for result in record["results"])


def result_line(result: Mapping[str, Any]) -> str:
    """Returns an evaluation's result as a line: `greedy_pass@1 on sort: 95.0% [91.0%, 97.3%] of 200, 3 of 200 were cut at 64 new
    tokens`."""
    ended = how_ended(result)
    return f"{result['mode']} on {result['dataset']}: {value_of(result)} of {result['problems']}{f', {ended}' if ended else ''}"


# Metrics of progress, for the summary of a run without evaluations.
_PROGRESS = ("reward_mean", "correctness", "held_out_loss", "held_out_accuracy", "loss")
_ENDS_STEPS = 10


def ends_of(steps: int) -> int:
    """Returns how many first and last steps of a run are averaged to compare its start and end: 10, and a quarter of the steps if
    there are fewer than 40. A mean over more steps would hide the change."""
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
"""The commands that the closing summary proposes after a run, by its verb."""


def run_summary(run: Path, verb: str) -> Iterator[str]:
    """Yields the lines of the closing summary of a run. Raises UserError for records that cannot be read."""
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
    """Returns the result of a run in one line: `greedy_pass@1 on sort: 12.0% at step 0 -> 95.0% [91.0%, 97.3%] of 200 at step 40`.

    It shows the evaluation that decides the best checkpoint, and its best result after step 0 (the lowest loss) unless that is the
    first or the last one. Without evaluations it shows the first progress metric that the run has; "" for a run without steps.
    """
    results = decisive_results(evaluations)
    if not results:
        return next(_measured(metrics), "")
    (first, before), (last, after) = next(iter(results.items())), next(reversed(results.items()))
    values = {step: value for step, value in probe_values(evaluations).items() if step > 0} or {last: 0.0}
    best = max(values, key=lambda step: (values[step], step))
    since = "" if first == last else f"{_value(before)} at step {first} -> "
    now = f"{value_of(after)} of {after['problems']:,} at step {last}"
    ended = f", {ended}" if (ended := how_ended(after)) else ""
    highest = "" if best in (first, last) else f"; best {_value(results[best])} at step {best}"
    return f"{after['mode']} on {after['dataset']}: {since}{now}{ended}{highest}"


def _evaluated(directory: Path) -> Iterator[str]:
    """Yields a line for each kind of evaluation, with its first and its last result."""
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
    return f"{result['value']:{form_of(result)}}"


def _measured(metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line with the first progress metric that the run has, at its first and last steps; nothing if it has none."""
    for name in _PROGRESS:
        if values := [row[name] for row in metrics if name in row]:
            count = ends_of(len(values))
            first, last = (sum(part) / count for part in (values[:count], values[-count:]))
            steps = "step" if count == 1 else f"{count} steps"
            yield f"{name}: {first:.4g} -> {last:.4g} (first and last {steps})"
            return


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"
