"""Differences from the evaluation before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.config.modes import why_not_comparable
from nmoe.parsing import json_of
from nmoe.runs.comparison import difference_of_results
from nmoe.runs.storage import step_name


def since_baseline(results: Sequence[Mapping[str, Any]], evaluations: Path) -> list[dict[str, Any]]:
    """The results, each with `since_start` where the run's step 0 asked the same problems in the same mode: the difference and,
    where there are problems enough, its 95% interval, paired by problem. `evaluations` is the run's directory `eval`."""
    file = evaluations / f"{step_name(0)}.json"
    before = json_of(file.read_text())["results"] if file.exists() else []
    known = {(one["mode"], one["dataset"], one.get("role")): one for one in before}
    return [_since(result, known.get((result["mode"], result["dataset"], result.get("role")))) for result in results]


def since_start(result: Mapping[str, Any]) -> str:
    """What a line says of a result's difference from the start, `", +5.0% [+1.0%, +9.0%] since the start"`; empty without one."""
    if (since := result.get("since_start")) is None:
        return ""
    shown = "+.4f" if result.get("lower_is_better") else "+.1%"
    interval = f" [{since['low']:{shown}}, {since['high']:{shown}}]" if "low" in since else ""
    return f", {since['difference']:{shown}}{interval} since the start"


def _since(result: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    left, right = (before or {}).get("outcomes") or {}, result.get("outcomes") or {}
    if before is None or len(right) < 2 or left.keys() != right.keys() or why_not_comparable(before, result):
        return dict(result)
    found = difference_of_results(before, result)
    bounds = {} if found.interval is None else {"low": found.interval.low, "high": found.interval.high}
    return {**result, "since_start": {"difference": found.value} | bounds}
