"""Finds runs and reads their small records: configuration, provenance, alerts, evaluations, and whether a run goes on.

Everything is opened to read only, and every file may be missing, half written, or deleted a moment later. What cannot be read is
said on the page, and hides nothing else. Nothing here imports torch, so that the server stays small.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nmoe.dashboard.lines import Lines
from nmoe.errors import UserError
from nmoe.runs.running import is_running

_DEEPEST = 3
# The first of these that a run has is shown in the list.
_HEADLINES = ("reward_mean", "held_out_loss", "loss")
# Files that make a folder with a config.toml a run.
_RUN_FILES = ("provenance.json", "metrics.jsonl", "samples")
_TAIL_BYTES = 1 << 16


def find_runs(roots: list[Path], known: Mapping[Path, str] = MappingProxyType({})) -> dict[str, Path]:
    """Returns the runs in the given directories, or that these are, by their names on the page. Those that are `known` have their
    names already. Raises UserError for a path that is no directory."""
    found = {name: path for path, name in known.items()}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root}: no such directory; name a run, or a directory of runs")
        paths = [root] if _is_run(root) else sorted(_below(root, _DEEPEST))
        for path in paths:
            if path in known:
                continue
            name = path.name if path == root else path.relative_to(root).as_posix()
            while name in found:
                name = f"{path.parent.name}/{name}" if "/" not in name else f"{name}'"
            found[name or path.resolve().name] = path
    return found


def _below(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = [Path(entry.path) for entry in os.scandir(directory) if entry.is_dir() and entry.name[0] != "."]
    except OSError:
        return
    for path in entries:
        if _is_run(path):
            yield path
        if depth > 1 and not (path / "config.json").exists():
            yield from _below(path, depth - 1)


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() and any((path / name).exists() for name in _RUN_FILES)


@dataclass
class Run:
    """A run's directory with the records that were read so far."""

    name: str
    path: Path
    alerts: Lines = field(init=False)
    _config: tuple[object, dict[str, Any], str] | None = None
    _summary: tuple[object, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.alerts = Lines(self.path / "alerts.jsonl")

    @property
    def tables(self) -> dict[str, Any]:
        """config.toml as nested tables; empty if it cannot be read."""
        return self._read_config()[0]

    @property
    def fault(self) -> str:
        """Why config.toml cannot be read; "" if it can."""
        return self._read_config()[1]

    def _read_config(self) -> tuple[dict[str, Any], str]:
        file = self.path / "config.toml"
        stamp = stamp_of(file)
        if self._config is None or self._config[0] != stamp:
            try:
                self._config = (stamp, tomllib.loads(file.read_text()), "")
            except (OSError, ValueError) as error:
                self._config = (stamp, {}, f"{file}: {_why(error)}")
        return self._config[1:]

    def provenance(self) -> dict[str, Any]:
        return json_file(self.path / "provenance.json")

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the results of all evaluations, oldest first, each with its `step`."""
        found = []
        for path in sorted(self.path.glob("eval/step_*.json")):
            record = json_file(path)
            for result in record.get("results", ()):
                if isinstance(result, dict) and isinstance(result.get("value"), int | float):
                    found.append({"step": record.get("step"), **_shown(result)})
        return found

    @property
    def is_gone(self) -> bool:
        return not self.path.is_dir()

    def status(self) -> str:
        """Returns "running", "ended" (which a run that was killed is, too) or "deleted"."""
        if self.is_gone:
            return "deleted"
        return "running" if is_running(self.path) else "ended"

    def steps(self) -> int | None:
        steps = self.tables.get("run", {}).get("steps")
        return steps if isinstance(steps, int) else None

    def summary(self) -> dict[str, Any]:
        """Returns the run's row in the list, from the end of its metrics."""
        file = self.path / "metrics.jsonl"
        stamp = (stamp_of(file), stamp_of(self.path / "config.toml"))
        # Of a deleted run the last row stays.
        if self._summary is None or (self._summary[0] != stamp and not self.is_gone):
            last = last_record(file)
            headline = next((name for name in _HEADLINES if isinstance(last.get(name), int | float)), None)
            self._summary = (
                stamp,
                {
                    "name": self.name,
                    "path": str(self.path),
                    "step": last.get("step", 0),
                    "steps": self.steps(),
                    "headline": headline,
                    "value": None if headline is None else last[headline],
                    "started": str(self.provenance().get("started_utc", "")),
                    "seed": self.tables.get("run", {}).get("seed"),
                    "fault": self.fault,
                    "samples": (self.path / "samples").is_dir(),
                },
            )
        return self._summary[1] | {"status": self.status(), "alerts": size_of(self.path / "alerts.jsonl") > 0}


def _shown(result: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("mode", "dataset", "value", "low", "high", "problems", "lower_is_better")
    return {key: result[key] for key in keys if key in result}


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested tables to dotted keys, tables in lists by their numbers."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            found |= flat({str(number): one for number, one in enumerate(value)}, f"{prefix}{key}.")
        elif isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def stamp_of(file: Path) -> tuple[int, int, int] | None:
    """Returns what changes whenever a file does; None if there is none."""
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def json_file(file: Path) -> dict[str, Any]:
    """Reads a file with one JSON object; empty if there is none or it is no such file."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def last_record(file: Path) -> dict[str, Any]:
    """Returns the last whole record of a JSON-lines file, reading only its end; empty if there is none."""
    try:
        with file.open("rb") as read:
            size = read.seek(0, os.SEEK_END)
            take = _TAIL_BYTES
            while True:
                read.seek(max(0, size - take))
                # A last line without a newline is being written.
                lines = read.read().split(b"\n")[:-1]
                if len(lines) > 1 or take >= size:
                    break
                take *= 4
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
