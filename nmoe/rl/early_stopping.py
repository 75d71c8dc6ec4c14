"""Early stopping: a run may end before its last step where every source of problems is solved often enough, or no source has
improved for a number of evaluations (Prechelt 1998, "Early Stopping - But When?", criterion UP).

Each source counts by itself: the mean over three skills would hide that the third still improves after two are learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from nmoe.runs.ledger import is_outside
from nmoe.types import GROUPS

# A gain below this is within the noise of a few hundred sampled answers.
LEAST_GAIN = 0.02

Rates = Mapping[str, float]


def rates_of(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The rate of each source in an evaluation's results, by dataset: "skills/add" and "skills/sort", or "sort" for a single
    source."""
    results = [result for result in results if not is_outside(result)]
    # Levels and subjects, "skills/level=3", are parts of sources, too small to decide by.
    kinds = tuple(f"{kind}=" for kind in GROUPS)
    named = [result for result in results if "/" in result["dataset"]]
    parts = [one for one in named if not one["dataset"].rpartition("/")[2].startswith(kinds)] or results[:1]
    return {result["dataset"]: result["value"] for result in parts}


def read_rates(evaluations: Path) -> list[dict[str, float]]:
    """The rates of a run's evaluations so far, oldest first, from its directory `eval`, so that a resumed run decides alike."""
    return [rates for results in _results(evaluations) if (rates := rates_of(results))]


def outside_of(results: Sequence[Mapping[str, Any]]) -> float | None:
    """The greedy_pass@1 of the probe out of the training distribution over all problems; None where it is not among the results."""
    values = [one["value"] for one in results if is_outside(one) and one["mode"] == "greedy_pass@1"]
    return values[0] if values else None


def read_outside(evaluations: Path) -> list[float]:
    """`outside_of` the run's evaluations so far, oldest first."""
    return [value for results in _results(evaluations) if (value := outside_of(results)) is not None]


def _results(evaluations: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(path.read_text())["results"] for path in sorted(evaluations.glob("step_*.json"))]


def reason_of_drops(history: Sequence[float], drops: int) -> str | None:
    """Why the run ends where the probe out of the distribution got worse `drops` times in a row; 0 drops never end it."""
    last = history[-drops - 1 :]
    if not drops or len(last) <= drops or any(after >= before for before, after in pairwise(last)):
        return None
    return (
        f"greedy_pass@1 out of distribution dropped {drops} times in a row, {' -> '.join(f'{one:.1%}' for one in last)}"
    )


def reason_to_end(history: Sequence[Rates], enough: float | None, patience: int | None) -> str | None:
    """Why the run ends after the last of these evaluations; None where it goes on."""
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
