"""Evaluations that are worse than an earlier one of the same problems, by more than chance.

Two evaluations in a row that each fall by a little are chance in half of all runs, and one fall that stays is not two. So an
evaluation is compared with the best before it and with the first, problem by problem (`benchmarks/stopping.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nmoe.config.modes import why_not_comparable
from nmoe.statistics import paired_p_value

# The chance that an evaluation which is as good as all before it counts as a loss.
LEVEL = 0.05


@dataclass(frozen=True)
class Loss:
    """An evaluation that is worse than an earlier one: `Loss(before=0.967, now=0.0, p=1e-9)`. `p` is one-sided, and counts that
    there were several to compare with."""

    before: float
    now: float
    p: float


def loss_of(history: Sequence[Mapping[str, Any]]) -> Loss | None:
    """How the last of these results is worse than the best before it or than the first, paired by problem; None where it is not, or
    where that may be chance. They are results of one probe as in eval/, oldest first.

    With k results before it the best was chosen among k, so p is that of the pair times k (Bonferroni). Results without `outcomes`
    of the same problems are compared with none.
    """
    *earlier, last = history
    if not earlier:
        return None
    best = max(earlier, key=_goodness)
    losses = [_loss(one, last, len(earlier)) for one in (best, earlier[0])]
    return next((one for one in losses if one is not None and one.p <= LEVEL), None)


def lasting_loss(history: Sequence[Mapping[str, Any]], evaluations: int) -> Loss | None:
    """The loss of the last result, if that many in a row have one; None for 0."""
    if not 0 < evaluations < len(history):
        return None
    losses = [loss_of(history[: len(history) - place]) for place in range(evaluations)]
    return None if None in losses else losses[0]


def _goodness(result: Mapping[str, Any]) -> float:
    value: float = result["value"]
    return -value if result.get("lower_is_better") else value


def _loss(before: Mapping[str, Any], now: Mapping[str, Any], comparisons: int) -> Loss | None:
    left, right = before.get("outcomes") or {}, now.get("outcomes") or {}
    if (
        left.keys() != right.keys()
        or not left
        or why_not_comparable(before, now)
        or _goodness(now) >= _goodness(before)
    ):
        return None
    p = paired_p_value([left[key] for key in right], [*right.values()]) / 2
    return Loss(before["value"], now["value"], min(1.0, comparisons * p))
