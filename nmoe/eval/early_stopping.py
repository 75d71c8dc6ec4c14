"""Compares the evaluations of one run: differences from its start, and reasons to end it early.

A run may end early if every source of problems is solved often enough, or if no source has improved for several
evaluations (Prechelt 1998, "Early Stopping - But When?", criterion UP). Each source counts by itself: the mean over
three skills would hide that the third still improves after two are learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.config.modes import why_not_comparable
from nmoe.parsing import json_of
from nmoe.runs.comparison import difference_of_results
from nmoe.runs.ledger import lasting_loss
from nmoe.runs.storage import step_name
from nmoe.types import GROUPS


def since_baseline(results: Sequence[Mapping[str, Any]], evaluations: Path) -> list[dict[str, Any]]:
    """Adds to each evaluation result the difference from the run's evaluation before its first step, under the key
    `since_start`.

    `evaluations` is the run's directory `eval`. The difference is paired by problem, and has a 95% interval if there
    are enough problems. A result stays as it is if step 0 has no result on the same problems in the same mode.
    """
    file = evaluations / f"{step_name(0)}.json"
    before = json_of(file.read_text())["results"] if file.exists() else []
    known = {(one["mode"], one["dataset"], one.get("role")): one for one in before}
    return [_since(result, known.get((result["mode"], result["dataset"], result.get("role")))) for result in results]


def since_start(result: Mapping[str, Any]) -> str:
    """Formats a result's difference from the start of the run, as ", +5.0% [+1.0%, +9.0%] since the start"; "" if it has none."""
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


# A gain below this is within the noise of a few hundred sampled answers.
LEAST_GAIN = 0.02

Rates = Mapping[str, float]


def rates_of(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the solve rate of each source in evaluation results, by name: "skills/add" and "skills/sort", or "sort"
    for a single source."""
    # Levels and subjects, "skills/level=3", are parts of sources, too small to decide by.
    kinds = tuple(f"{kind}=" for kind in GROUPS)
    named = [result for result in results if "/" in result["dataset"]]
    parts = [one for one in named if not one["dataset"].rpartition("/")[2].startswith(kinds)] or results[:1]
    return {result["dataset"]: result["value"] for result in parts}


def reason_of_drops(history: Sequence[Mapping[str, Any]], drops: int, role: str) -> str | None:
    """Returns the reason to end a run whose solve rate fell, as a text; None if the run goes on.

    There is a reason if the last `drops` evaluations were all significantly worse than before; `drops` = 0 switches
    this off. `history` has the results of one environment, oldest first, and `role` says whether it is
    "in_distribution" or "out_of_distribution".
    """
    loss = lasting_loss(history, drops)
    if loss is None:
        return None
    lasting = "in one evaluation" if drops == 1 else f"in {drops} evaluations in a row"
    return (
        f"greedy_pass@1 {role.replace('_', ' ')} is worse than before {lasting}, {loss.now:.1%} after {loss.before:.1%} "
        f"(p = {loss.p:.2g}, paired by problem)"
    )


def reason_to_end(history: Sequence[Rates], enough: float | None, patience: int | None) -> str | None:
    """Returns the reason to end a run whose problems are solved or no longer improve, as a text; None if the run goes on.

    `history` has the solve rates by source of each evaluation, oldest first. The run ends if the last rates are all at
    least `enough`, or if no source gained LEAST_GAIN in the last `patience` evaluations; None switches either off.
    """
    if enough is not None and min(history[-1].values()) >= enough:
        return f"every source is solved at {enough:.0%} or more"
    if patience is not None and len(history) > patience:
        best = dict(history[0])
        since = 0
        for rates in history[1:]:
            gained = [name for name, rate in rates.items() if rate >= best[name] + LEAST_GAIN]
            since = 0 if gained else since + 1
            best |= {name: rates[name] for name in gained}
        if since >= patience:
            return f"no source has got better by {LEAST_GAIN:.0%} in {since} evaluations"
    return None
