"""`nmoe runs list` and `nmoe runs show`: the lines they print."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nmoe.config.commands import COMMANDS
from nmoe.config.listing import columns
from nmoe.errors import UserError
from nmoe.runs.answers import how_ended
from nmoe.runs.directory import flat_keys
from nmoe.runs.ledger import probe_values
from nmoe.runs.provenance import resumptions
from nmoe.runs.record import RunRecord, find_runs, interval_of, read_run

# The first of these that a run has is shown in the list.
_HEADLINES = ("reward_mean", "held_out_loss", "loss")
_LAST_ALERTS = 5


def list_runs(directory: Path) -> Iterator[str]:
    """One line a run: where, command, steps, start, the last reward or loss, and whether it is running, finished or interrupted. A
    run that cannot be read is a line that says why."""
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
    """Status and steps of a run, the keys of its configuration that differ from their defaults, its provenance, its best and last
    evaluations and its last alerts. Raises UserError (`read_run`)."""
    run = read_run(path)
    _, command, steps, started, last, status = _row(run)
    yield f"{run.path}: {command}, {status}, step {steps}, started {started}, {last}"
    yield "configuration (what differs from the defaults)"
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
    """The dotted keys of the run's configuration that do not hold their defaults; all keys where its command
    has changed since."""
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
    """`greedy_pass@1 on sort: 0.950 [0.910, 0.973] of 200, 3 of 200 were cut at 64 new tokens`."""
    interval = interval_of(result)
    shown = f"{result['value']:.3f}" + (f" [{interval.low:.3f}, {interval.high:.3f}]" if interval else "")
    ended = how_ended(result)
    return f"{result['mode']} on {result['dataset']}: {shown} of {result['problems']}{f', {ended}' if ended else ''}"
