"""The time line of an asynchronous run as a picture: when the trainer waited for samples, and when the engines waited for
requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nmoe.runs.charts import COLOURS, figure, missing
from nmoe.runs.lanes import BUSY, IDLE, PUBLISHES, TRAINS, WAITS, bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The last steps of a run; more would be lines.
_MOST_STEPS = 40
_GREY = "#cccccc"
_COLOUR = {WAITS: _GREY, TRAINS: COLOURS[0], PUBLISHES: COLOURS[1], BUSY: COLOURS[2], IDLE: _GREY}


def timeline(rows: Sequence[Mapping[str, Any]], size: tuple[float, float] = (7, 2.0)) -> Figure | None:
    """Draws the last steps of a run; None for a run that does not sample beside its training, or without matplotlib."""
    found = bars([row for row in rows if "trainer_wait_s" in row][-_MOST_STEPS:])
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
