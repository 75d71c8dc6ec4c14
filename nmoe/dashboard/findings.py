"""What stands out in a run, in sentences for the first page that somebody sees of it."""

from __future__ import annotations

import math
from statistics import fmean, pvariance, stdev
from typing import Any

from nmoe.dashboard.curves import Metrics

# Steps on each side of a fall, and the standard errors by which their means differ at least: the largest of hundreds of differences
# of a reward that only varies rarely has five.
_SIDE, _ERRORS = 8, 5.0
_LAST = 10
_WRONG_SHARE = 0.05


def findings(metrics: Metrics, totals: dict[str, Any], alerts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns sentences about a run, each with the view that shows more: `{"text": "reward_mean fell from 0.81 to 0.2 at step 60",
    "view": "step", "step": 60}`."""
    found = []
    fell = fall(metrics, "reward_mean")
    if fell is not None:
        step, before, after = fell
        found.append(
            {"text": f"reward_mean fell from {before:.3g} to {after:.3g} at step {step}", "view": "step", "step": step}
        )
    if totals.get("never_solved"):
        said = f"{totals['never_solved']:,} of {totals['problems']:,} recorded problems were never solved"
        found.append({"text": said, "view": "problems"})
    found += [{"text": said, "view": "experts"} for said in dead_experts(metrics)]
    wrong = metrics.mean_of_last("high_reward_but_wrong", _LAST)
    if wrong is not None and wrong > _WRONG_SHARE:
        said = f"{wrong:.0%} of the samples of the last {_LAST} steps were wrong and highly rewarded: look for a hacked reward"
        found.append({"text": said, "view": "samples", "query": {"wrong": "1"}})
    if alerts:
        said = "1 alert" if len(alerts) == 1 else f"{len(alerts):,} alerts"
        found.append({"text": f"{said}, the first at step {alerts[0].get('step')}", "view": "alerts"})
    return found


def fall(metrics: Metrics, name: str) -> tuple[int, float, float] | None:
    """Returns the step of the largest lasting fall of a metric, with its means before and after; None if there is none."""
    column = metrics.columns.get(name)
    if column is None:
        return None
    values = [(step, value) for step, value in zip(metrics.steps, column, strict=False) if value == value]
    best: tuple[float, int] | None = None
    sums = [0.0]
    for _, value in values:
        sums.append(sums[-1] + value)
    for at in range(_SIDE, len(values) - _SIDE + 1):
        drop = (2 * sums[at] - sums[at - _SIDE] - sums[at + _SIDE]) / _SIDE
        if best is None or drop > best[0]:
            best = drop, at
    if best is None:
        return None
    drop, at = best
    before, after = ([value for _, value in part] for part in (values[at - _SIDE : at], values[at : at + _SIDE]))
    error = max(math.hypot(stdev(before), stdev(after)) / math.sqrt(_SIDE), 1e-9)
    spread = max(value for _, value in values) - min(value for _, value in values)
    if drop < _ERRORS * error or drop < 0.15 * spread:
        return None
    # The split of its surroundings into two levels that leaves the least variance is where it fell.
    first, last = max(0, at - 2 * _SIDE), min(len(values), at + 2 * _SIDE)
    near = [value for _, value in values[first:last]]
    at = first + min(
        range(2, len(near) - 1), key=lambda cut: sum(len(p) * pvariance(p) for p in (near[:cut], near[cut:]))
    )
    return values[at][0], fmean(before), fmean(after)


def dead_experts(metrics: Metrics) -> list[str]:
    """Returns a sentence for each layer in which experts get no token at the last step, with the step since when some do not."""
    found = []
    last = metrics.load_at(-1)
    for layer in range(metrics.layers):
        dead = [expert for expert, share in enumerate(last.get(layer, ())) if share == 0]
        if not dead:
            continue
        column = metrics.columns.get(f"dead_experts/{layer}", ())
        since = next((at for at in range(len(column) - 1, -1, -1) if not column[at]), -1) + 1
        names = ", ".join(map(str, dead[:8])) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
        step = metrics.steps[min(since, len(metrics.steps) - 1)]
        found.append(f"layer {layer}: expert {names} gets no token, since step {step}")
    return found
