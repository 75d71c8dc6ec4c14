"""The time line of an asynchronous run: when the trainer waited for samples, and when the engines waited for requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nmoe.runs.charts import COLOURS, figure, missing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The last steps of a run; more would be lines.
MOST_STEPS = 40
_GREY = "#cccccc"
# What the trainer did, in the order of a step, with its colour.
_DID = (
    ("trainer_wait_s", "waits for groups", _GREY),
    ("time_learn_s", "trains", COLOURS[0]),
    ("time_sync_s", "publishes", COLOURS[1]),
)
_BUSY, _IDLE = "engines have requests", "engines wait for requests"
_COLOUR = {doing: colour for _, doing, colour in _DID} | {_BUSY: COLOURS[2], _IDLE: _GREY}


class Bar(NamedTuple):
    """Seconds of a step, from the beginning of the first one: `Bar("trainer", 1, 0.0, 3.0, "waits for groups")`."""

    lane: str
    step: int
    begin: float
    end: float
    doing: str


def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Returns what trainer and engines did in these steps, from their metrics; empty for a run that does not sample beside its
    training.

    Of the engines, the first part of each interval is the share in which one had a request. An interval ends when a step has its
    groups, so that it reaches back into the training of the step before.
    """
    found = list[Bar]()
    at = since = 0.0
    for row in rows:
        if "trainer_wait_s" not in row or "time_step_s" not in row:
            continue
        step, began = row["step"], at
        for name, doing, _ in _DID:
            found.append(Bar("trainer", step, at, at := at + row.get(name, 0.0), doing))
        took = began + row["trainer_wait_s"]
        busy = since + (1 - row["engine_idle_share"]) * (took - since)
        found += [Bar("engines", step, since, busy, _BUSY), Bar("engines", step, busy, took, _IDLE)]
        since, at = took, began + row["time_step_s"]
    return found


def timeline(rows: Sequence[Mapping[str, Any]], size: tuple[float, float] = (7, 2.0)) -> Figure | None:
    """Draws the last steps of a run; None for a run that does not sample beside its training, or without matplotlib."""
    found = bars([row for row in rows if "trainer_wait_s" in row][-MOST_STEPS:])
    if not found or missing():
        return None
    drawn, axes = figure(f"Who waited for whom, steps {found[0].step} to {found[-1].step}", size)
    for y, lane in enumerate(("engines", "trainer")):
        for doing, colour in _COLOUR.items():
            spans = [(bar.begin, bar.end - bar.begin) for bar in found if (bar.lane, bar.doing) == (lane, doing)]
            if spans:
                axes.broken_barh(spans, (y - 0.35, 0.7), color=colour, label=doing)
    axes.set_yticks([0, 1], ["engines", "trainer"])
    axes.set(xlabel="seconds", xlim=(0, max(bar.end for bar in found)))
    drawn.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return drawn
