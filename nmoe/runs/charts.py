"""Charts of a run's metrics over its steps, drawn by matplotlib as PNG or SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nmoe.extras import how_to_install
from nmoe.runs.storage import storage_errors, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, whose colours colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MOST_POINTS = 400
_MOST = 1e300
# A curve with more steps than this is drawn faintly, below its running mean over a twentieth of the steps.
_SMOOTH_ABOVE_STEPS = 60
# Characters that XML does not have.
CONTROL = re.compile(r"[^\t\n -~\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0001fffd]")

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A curve over the steps. `bars` are intervals `(step, low, high)` of its points; a curve that has them is not smoothed."""

    label: str
    points: Sequence[Point]
    colour: str
    bars: Sequence[tuple[float, float, float]] = ()


def missing() -> str:
    """Returns one line that says how to get the pictures; "" if matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return f"Pictures need matplotlib, which is not installed; run: {how_to_install('report')}"
    return ""


def plot_curves(
    metrics: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path, title: str, ylabel: str, log: bool = False
) -> Path | None:
    """Draws the named metrics over the steps as a PNG file, and returns its path.

    metrics: rows such as `{"step": 10, "reward_mean": 0.41}`. A row that lacks a name adds no point to that curve, and a name that
    no row has adds no curve. Without any curve, or without matplotlib, nothing is drawn, and None is returned. log: a logarithmic
    scale, unless no value is positive.

    Raises StorageError if the disk is full.
    """
    curves = {name: [(row["step"], row[name]) for row in metrics if name in row] for name in names}
    drawn = chart(
        title,
        ylabel,
        [Curve(name, curves[name], COLOURS[at % len(COLOURS)]) for at, name in enumerate(filter(curves.get, names))],
        log,
    )
    if drawn is None:
        return None
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, png(drawn))
    return path


def chart(
    title: str,
    ylabel: str,
    curves: Sequence[Curve],
    log: bool = False,
    percent: bool = False,
    size: tuple[float, float] = (7, 3.6),
) -> Figure | None:
    """Draws curves over the steps; None without a point, or without matplotlib. Values that are not finite are left out.

    log: a logarithmic scale, unless no value is positive. percent: values are rates, whose axis is in percent. A curve of more than
    60 points without bars is drawn faintly, below its running mean over a twentieth of the points; of more than 400 points,
    both go through the means of consecutive ones. A legend is drawn if there are labels.
    """
    curves = [
        Curve(one.label, _drawable(one.points), one.colour, _drawable(one.bars))
        for one in curves
        if _drawable(one.points)
    ]
    if not curves or missing():
        return None
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    drawn, axes = figure(title, size)
    xlabel = "step"
    for one in curves:
        steps, values = np.array(one.points, dtype=np.float64).T
        how: dict[str, Any] = {"color": one.colour, "label": one.label or None}
        if one.bars:
            at, low, high = np.array(one.bars, dtype=np.float64).T
            axes.vlines(at, low, high, color=one.colour, linewidth=1)
            axes.plot(steps, values, marker="o", markersize=3, linewidth=1.2, **how)
        elif len(steps) <= _SMOOTH_ABOVE_STEPS:
            axes.plot(steps, values, linewidth=1.6, marker="o" if len(steps) < 3 else "", **how)
        else:
            smooth = running_mean(values, len(steps) // 20)
            axes.plot(_thinned(steps), _thinned(values), color=one.colour, linewidth=0.7, alpha=0.3)
            axes.plot(_thinned(steps), _thinned(smooth), linewidth=1.8, **how)
            xlabel = "step (bold: running mean over a twentieth of the steps)"
    heights = [value for one in curves for _, value in one.points] + [
        end for one in curves for _, *ends in one.bars for end in ends
    ]
    if log and max(heights) > 0:
        axes.set_yscale("log", nonpositive="mask")
    elif min(heights) >= 0:
        axes.set_ylim(bottom=0, top=None if max(heights) else 1)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.25, linewidth=0.6)
    if any(one.label for one in curves):
        axes.legend(frameon=False, fontsize=9)
    return drawn


def figure(title: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Returns an empty figure with axes below a title, which is text and no formula."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=size, dpi=120, layout="constrained")
    axes = drawn.add_subplot()
    axes.set_title(CONTROL.sub("\ufffd", title), loc="left", fontsize=11, fontweight="bold", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def png(drawn: Figure) -> bytes:
    content = io.BytesIO()
    drawn.savefig(content, format="png")
    return content.getvalue()


def svg(drawn: Figure) -> bytes:
    """Returns a figure as SVG whose texts are text. The same figure gives the same bytes."""
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "nmoe", "svg.fonttype": "none"}):
        drawn.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def _drawable(rows: Sequence[Any]) -> list[Any]:
    """Returns the rows whose numbers are all finite, and small enough that arithmetic on them stays finite."""
    return [row for row in rows if all(math.isfinite(value) and abs(value) < _MOST for value in row)]


def _thinned(values: np.ndarray) -> np.ndarray:
    size = math.ceil(len(values) / _MOST_POINTS)
    starts = np.arange(0, len(values), size)
    means: np.ndarray = np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))
    return means


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns for each value the mean of it and the `window - 1` values before it (fewer at the start)."""
    sums = np.cumsum(values)
    sums[window:] -= sums[:-window].copy()
    return sums / np.minimum(np.arange(1, len(values) + 1), window)
