"""The metrics of a run as columns in memory, which grow with its file; curves are sent by cursor, thinned to the width of a
picture."""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from nmoe.dashboard.lines import Lines

_NAN = math.nan
_LOAD = "expert_load/"
# Seconds of a step and of its parts; a step's leave out a save.
_TIMES = (
    *("time_step_s", "time_rollout_s", "trainer_wait_s", "time_learn_s", "time_sync_s", "time_record_s", "time_save_s"),
    *("time_grade_s", "engine_idle_share"),
)
# Rows that are added at once.
_ROWS = 500
# Steps before and after a step that `changed` compares.
_WINDOW = 12


class Metrics:
    """The metrics of one run."""

    def __init__(self, run: Path) -> None:
        self.lines = Lines(run / "metrics.jsonl")
        self._reset()

    def _reset(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self._offsets = array("q")
        self.layers = 0
        self._generation = self.lines.generation

    def read(self) -> None:
        """Reads the rows that came since the last time."""
        rows = list[dict[str, Any]]()
        for offset, row in self.lines.new():
            if self.lines.generation != self._generation:
                self._reset()
                rows = []
            if isinstance(row.get("step"), int):
                self.steps.append(row["step"])
                self._offsets.append(offset)
                rows.append(row)
            if len(rows) == _ROWS:
                self._add(rows)
                rows = []
        if self.lines.generation != self._generation:
            self._reset()
            rows = []
        self._add(rows)

    def _add(self, rows: list[dict[str, Any]]) -> None:
        """Adds the last rows to the columns, a column at a time: twice as fast as value by value."""
        before = len(self.steps) - len(rows)
        for name in dict.fromkeys(chain.from_iterable(rows)):
            values = [row.get(name, _NAN) for row in rows]
            try:
                part = array("d", values)
            except (TypeError, OverflowError):  # lists, texts, or integers beyond any float
                if name.startswith(_LOAD) and name[len(_LOAD) :].isdigit():
                    self.layers = max(self.layers, int(name[len(_LOAD) :]) + 1)
                part = array("d", [value if isinstance(value, float) else _NAN for value in values])
                if name not in self.columns and all(value != value for value in part):
                    continue
            column = self.columns.setdefault(name, array("d"))
            column.extend([_NAN] * (before - len(column)))
            column.extend(part)

    @property
    def cursor(self) -> str:
        return f"{self._generation}:{len(self.steps)}"

    def since(self, cursor: str) -> int:
        """Returns the number of the first row that is new to the holder of a cursor; 0 if the file was begun anew since."""
        generation, _, count = cursor.partition(":")
        if generation != str(self._generation) or not count.isdigit():
            return 0
        return min(int(count), len(self.steps))

    def curve(self, name: str, first: int, points: int) -> tuple[list[int], list[float]]:
        """Returns steps and values of a metric from row `first` on. Of more than `points` values these are the least and the
        greatest of each stretch."""
        column = self.columns.get(name, array("d"))
        rows = [row for row in range(first, len(column)) if _is_drawn(column[row])]
        if len(rows) > points:
            rows = thinned(rows, column, points)
        return [self.steps[row] for row in rows], [column[row] for row in rows]

    def smoothed(self, name: str, first: int, points: int, window: int) -> tuple[list[int], list[float]]:
        """Returns steps and running means over the last `window` values of a metric, from row `first` on. The means are of all
        values, before some are left out: at more than `points` rows the least and the greatest mean of each stretch are kept."""
        column = self.columns.get(name, array("d"))
        means, recent = array("d", [_NAN]) * len(column), deque[float](maxlen=window)
        rows = list[int]()
        for row in range(self._reach(column, first, window), len(column)):
            value = column[row]
            if not _is_drawn(value):
                continue
            recent.append(value)
            if row >= first:
                # Summed anew each time: a running sum keeps the rounding of a value long after it has left the window.
                means[row] = math.fsum(recent) / len(recent)
                rows.append(row)
        if len(rows) > points:
            rows = thinned(rows, means, points)
        return [self.steps[row] for row in rows], [means[row] for row in rows]

    @staticmethod
    def _reach(column: Sequence[float], first: int, window: int) -> int:
        """Returns the row from which on there are `window` - 1 values before row `first`."""
        row, left = min(first, len(column)), window - 1
        while row and left:
            row -= 1
            left -= _is_drawn(column[row])
        return row

    def at(self, names: Sequence[str], rows: range) -> list[dict[str, float]]:
        """Returns rows with their step and the metrics that they have of these."""
        found = list[dict[str, float]]()
        for row in rows:
            values = {name: column[row] for name in names if row < len(column := self.columns.get(name, array("d")))}
            found.append({"step": self.steps[row], **{name: one for name, one in values.items() if one == one}})
        return found

    def load(self, layer: int, columns: int) -> dict[str, Any]:
        """Returns each expert's share of a layer's picks, at up to `columns` steps spread over the run: the lines of these steps
        alone are read."""
        count = len(self.steps)
        spread = max(1, columns - 1)
        rows = range(count) if count <= columns else [round(at * (count - 1) / spread) for at in range(columns)]
        steps, shares = list[int](), list[list[float]]()
        try:
            with self.lines.file.open("rb") as file:
                for row in rows:
                    file.seek(self._offsets[row])
                    found = json.loads(file.readline()).get(f"{_LOAD}{layer}")
                    if isinstance(found, list):
                        steps.append(self.steps[row])
                        shares.append(found)
        except (OSError, ValueError, AttributeError):
            pass  # deleted or cut back meanwhile: the steps so far are shown
        return {"steps": steps, "shares": shares, "layers": self.layers}

    def load_at(self, row: int) -> dict[int, list[float]]:
        """Returns each expert's share of the picks at a row, by layer; empty if it cannot be read."""
        try:
            with self.lines.file.open("rb") as file:
                file.seek(self._offsets[row])
                found = json.loads(file.readline())
        except (OSError, ValueError, IndexError):
            return {}
        return {layer: found.get(f"{_LOAD}{layer}", []) for layer in range(self.layers)}

    def changed(self, step: int) -> list[dict[str, Any]]:
        """Returns the metrics that changed most at a step: their means over the steps before and from it on, in units of the
        deviation before. Timings are left out."""
        at = next((row for row, one in enumerate(self.steps) if one >= step), len(self.steps))
        found = list[dict[str, Any]]()
        for name, column in self.columns.items():
            if name == "step" or name.startswith(("time_", "tokens_per_second", "weight/")):
                continue
            before = [value for value in column[max(0, at - _WINDOW) : at] if value == value]
            after = [value for value in column[at : at + _WINDOW] if value == value]
            if len(before) < 3 or len(after) < 2:
                continue
            old, new = fmean(before), fmean(after)
            spread = max(pstdev(before), 1e-3 * max(abs(old), abs(new)), 1e-12)
            found.append({"name": name, "before": old, "after": new, "score": abs(new - old) / spread})
        return sorted(found, key=lambda one: -one["score"])[:12]

    def mean_of(self, name: str) -> float | None:
        """Returns the mean of a metric over all rows that have it; None if none has."""
        values = [value for value in self.columns.get(name, ()) if math.isfinite(value)]
        return fmean(values) if values else None

    def mean_times(self) -> dict[str, float | None]:
        """Returns the mean seconds of a step and of its parts. A save is in the rows of some steps only, and counts over all."""
        found = {name: self.mean_of(name) for name in _TIMES}
        saved = [value for value in self.columns.get("time_save_s", ()) if math.isfinite(value)]
        if saved and found["time_step_s"] is not None:
            seconds = sum(saved) / sum(value == value for value in self.columns["time_step_s"])
            found |= {"time_save_s": seconds, "time_step_s": found["time_step_s"] + seconds}
        return found

    def mean_of_last(self, name: str, count: int) -> float | None:
        values = [value for value in self.columns.get(name, array("d"))[-count:] if value == value]
        return fmean(values) if values else None


def _is_drawn(value: float) -> bool:
    return abs(value) < 1e300  # not of a value that is no number


def thinned(rows: Sequence[int], column: Sequence[float], points: int) -> list[int]:
    """Returns at most `points` of the rows: of each stretch the least and the greatest value, and the last."""
    stretches = max(1, points // 2)
    size = len(rows) / stretches
    kept = list[int]()
    for number in range(stretches):
        part = rows[int(number * size) : int((number + 1) * size)]
        if part:
            low, high = min(part, key=column.__getitem__), max(part, key=column.__getitem__)
            kept += sorted({low, high})
    if kept and kept[-1] != rows[-1]:
        kept.append(rows[-1])
    return kept


def band(
    runs: Sequence[tuple[Sequence[int], Sequence[float]]], points: int
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Returns steps, medians, least and greatest values over several curves, at the steps that all of them have. Of
    more than `points` steps these are each stretch's: its median's median, its least and its greatest value."""
    if not all(steps for steps, _ in runs):
        return [], [], [], []
    tables = [dict(zip(*run, strict=True)) for run in runs]
    steps = sorted(set.intersection(*map(set, tables)))
    values = [[table[step] for table in tables] for step in steps]
    size = math.ceil(len(steps) / points) if steps else 1
    parts = [values[at : at + size] for at in range(0, len(steps), size)]
    return (
        [steps[min(at + size, len(steps)) - 1] for at in range(0, len(steps), size)],
        [median(median(one) for one in part) for part in parts],
        [min(map(min, part)) for part in parts],
        [max(map(max, part)) for part in parts],
    )
