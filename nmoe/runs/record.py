"""Reads a run from its files: configuration, steps, evaluations, and whether it is running, finished or interrupted."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmoe.config.commands import COMMANDS
from nmoe.config.kinds import command_for
from nmoe.errors import UserError
from nmoe.parsing import json_of, toml_of
from nmoe.runs.directory import flat_keys
from nmoe.runs.ledger import read_lines
from nmoe.runs.provenance import read_provenance
from nmoe.runs.record_links import refuse_missing
from nmoe.runs.running import is_running
from nmoe.statistics import Interval

Status = Literal["running", "finished", "interrupted"]


@dataclass(frozen=True)
class RunRecord:
    """The records that a run has written so far.

    config: config.toml, by dotted keys. tables: config.toml as nested tables.
    steps: the number of its last step; None if it is not known yet.
    evaluations: the records of eval/, oldest first.
    """

    path: Path
    command: str
    config: Mapping[str, Any]
    tables: Mapping[str, Any]
    provenance: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    alerts: Sequence[Mapping[str, Any]]
    steps: int | None
    status: Status

    @property
    def last_step(self) -> int:
        """The last step that is done; 0 before the first."""
        return self.metrics[-1]["step"] if self.metrics else 0

    def last(self, name: str) -> float | None:
        """Returns the metric's value at the last step that has one as a number; None if no step has."""
        return next((row[name] for row in reversed(self.metrics) if isinstance(row.get(name), int | float)), None)


def read_run(path: Path) -> RunRecord:
    """Reads a run, or the `rl` run of a speedrun's directory. An incomplete last line of a file is left out.

    Raises UserError, naming the file, if `path` is no run or a record cannot be read.
    """
    try:
        return _read_run(path)
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}); permit it, or put the file back"
        ) from error


def _read_run(path: Path) -> RunRecord:
    if not (path / "config.toml").exists() and (path / "rl" / "config.toml").exists():
        path = path / "rl"
    file = path / "config.toml"
    if not file.exists():
        raise UserError(f"{path}: not the directory of a run (no config.toml); `nmoe runs list` shows those there are")
    try:
        tables = toml_of(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not readable as TOML ({error}); put back the file the run wrote") from error
    run = tables.get("run", {})
    if not isinstance(run, dict) or not isinstance(run.get("steps", 0), int):
        raise UserError(f"{file}: not the configuration of a run: run = {run!r}; put back the file the run wrote")
    refuse_missing(path)
    provenance, metrics = read_provenance(path), read_lines(path / "metrics.jsonl")
    log = (path / "log.txt").read_text(errors="replace") if (path / "log.txt").exists() else ""
    steps = _steps(tables, log)
    ended = bool(metrics) and ((steps is not None and metrics[-1]["step"] >= steps) or _ended_early(log))
    status: Status = "running" if is_running(path) else "finished" if ended else "interrupted"
    return RunRecord(
        path=path,
        command=_command(provenance.get("argv", []), file),
        config=flat_keys(tables),
        tables=tables,
        provenance=provenance,
        metrics=metrics,
        evaluations=read_evaluations(path / "eval"),
        alerts=_alerts(path / "alerts.jsonl"),
        steps=steps,
        status=status,
    )


def read_evaluations(directory: Path) -> list[dict[str, Any]]:
    """Reads the evaluations of a run, oldest first. Raises UserError naming a file that is no evaluation."""
    found = []
    for path in sorted(directory.glob("step_*.json")):
        try:
            record = json_of(path.read_text())
            for result in record["results"]:
                result["mode"], result["dataset"], result["problems"]
                float(result["value"])
                interval_of(result)
            int(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not an evaluation ({error!r}); remove the file or evaluate again") from error
        found.append(record)
    return found


def interval_of(result: Mapping[str, Any]) -> Interval | None:
    """Returns the 95% interval of an evaluation's result. A loss on fewer than three sequences has none: then None."""
    return Interval(float(result["low"]), float(result["high"])) if "low" in result else None


def form_of(result: Mapping[str, Any]) -> str:
    """Returns the format of the values of an evaluation: percent for rates, which all evaluations are except losses."""
    return ".4g" if result.get("lower_is_better") else ".1%"


def value_of(result: Mapping[str, Any]) -> str:
    """Formats the value of an evaluation with its interval, if it has one: `95.0% [91.0%, 97.3%]`."""
    form, interval = form_of(result), interval_of(result)
    return f"{result['value']:{form}}" + (f" [{interval.low:{form}}, {interval.high:{form}}]" if interval else "")


def _alerts(file: Path) -> list[dict[str, Any]]:
    alerts = read_lines(file)
    for alert in alerts:
        if "message" not in alert:
            raise UserError(f"{file}: an alert without a 'message': {alert!r}; remove the line")
    return alerts


def find_runs(directory: Path) -> list[Path]:
    """Finds the runs directly in a directory or one folder deeper, sorted by path. Raises UserError if there is no such
    directory."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; name the one that run.directory says")
    return sorted(file.parent for depth in ("*", "*/*") for file in directory.glob(f"{depth}/provenance.json"))


def _command(argv: Sequence[str], config: Path) -> str:
    """Returns the command of a command line, "rl train" for `["nmoe", "rl", "train", "sort_grpo"]`; for any other program, such as
    a script, the command that the configuration is for."""
    for words in (2, 1):
        if (command := " ".join(argv[1 : 1 + words])) in COMMANDS:
            return command
    return command_for(config)


def _steps(tables: Mapping[str, Any], log: str) -> int | None:
    """Returns the number of the run's last step, from its configuration or, where that counts epochs, from its progress lines; None
    if neither has it."""
    if steps := tables.get("run", {}).get("steps", 0):
        return steps
    totals = re.findall(rf"^{re.escape(str(tables.get('run', {}).get('name')))} \d+/(\d+)  ", log, re.MULTILINE)
    return int(totals[-1]) if totals else None


def _ended_early(log: str) -> bool:
    return re.search(r"^step \d+: end(s|ed) here, since ", log, re.MULTILINE) is not None
