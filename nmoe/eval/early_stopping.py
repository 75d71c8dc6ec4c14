"""Early stopping: a run may end before its last step where every source of problems is solved often enough, or no source has
improved for a number of evaluations (Prechelt 1998, "Early Stopping - But When?", criterion UP).

Each source counts by itself: the mean over three skills would hide that the third still improves after two are learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nmoe.runs.ledger import lasting_loss
from nmoe.types import GROUPS

# A gain below this is within the noise of a few hundred sampled answers.
LEAST_GAIN = 0.02

Rates = Mapping[str, float]


def rates_of(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The rate of each source in a probe's results, by dataset: "skills/add" and "skills/sort", or "sort" for a single source."""
    # Levels and subjects, "skills/level=3", are parts of sources, too small to decide by.
    kinds = tuple(f"{kind}=" for kind in GROUPS)
    named = [result for result in results if "/" in result["dataset"]]
    parts = [one for one in named if not one["dataset"].rpartition("/")[2].startswith(kinds)] or results[:1]
    return {result["dataset"]: result["value"] for result in parts}


def reason_of_drops(history: Sequence[Mapping[str, Any]], drops: int, role: str) -> str | None:
    """Why the run ends where a probe of this role was worse than before in its last `drops` evaluations, by more than chance; 0
    drops never end it. `history` has its results, oldest first."""
    loss = lasting_loss(history, drops)
    if loss is None:
        return None
    lasting = "in one evaluation" if drops == 1 else f"in {drops} evaluations in a row"
    return (
        f"greedy_pass@1 {role.replace('_', ' ')} is worse than before {lasting}, {loss.now:.1%} after {loss.before:.1%} "
        f"(p = {loss.p:.2g}, paired by problem)"
    )


def reason_to_end(history: Sequence[Rates], enough: float | None, patience: int | None) -> str | None:
    """Why the run ends after the last of these evaluations; None if it goes on."""
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
