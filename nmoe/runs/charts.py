"""Charts of a run's metrics over its steps: as SVG for a self-contained page, and as PNG files."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nmoe.errors import UserError
from nmoe.extras import how_to_install
from nmoe.runs.storage import storage_errors

# Okabe and Ito's palette, whose colours colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 28, 34
_MOST_POINTS = 400
_LEAST, _MOST = 1e-300, 1e300
# What HTML has no character for.
_CONTROL = re.compile(r"[^\t\n -~\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0001fffd]")

Point = tuple[float, float]


def text(value: object) -> str:
    """Escapes a value for HTML and SVG, so that it is shown as text and nothing in it is executed."""
    return escape(_CONTROL.sub("\ufffd", str(value)))


def chart(
    title: str,
    curves: Mapping[int, Sequence[Point]],
    log: bool = False,
    bars: Mapping[int, Sequence[tuple[float, float, float]]] | None = None,
    percent: bool = False,
) -> str:
    """Draws curves over the steps as an `<svg>`, the curve `n` in the n-th colour; "" without a point. Values that are not finite
    are left out.

    bars: intervals `(step, low, high)` of a curve's points. log: a logarithmic scale, if all values are positive. percent: values
    are rates, whose axis is in percent. A curve of more than 400 points is drawn through the means of consecutive points, one of
    more than 60 faintly, below its running mean over a twentieth of the points.
    """
    curves = {number: [point for point in curve if _drawable(*point)] for number, curve in curves.items()}
    bars = {number: [bar for bar in rows if _drawable(*bar)] for number, rows in (bars or {}).items()}
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    heights = [y for _, y in points] + [y for rows in bars.values() for _, *ends in rows for y in ends]
    log = log and min(heights) > 0
    low, high = _bounds(heights, log)
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    def x(step: float) -> str:
        share = (step - first) / (last - first) if last > first else 0.5
        return f"{_LEFT + share * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(value: float) -> str:
        share = (_scaled(value, log) - low) / (high - low)
        return f"{_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(title)}">',
        f'<text x="{_LEFT}" y="16" class="title">{text(title)}</text>',
    ]
    for tick in _ticks(low, high):
        value = 10**tick if log else tick
        mark = f"{100 * value:.3g}%" if percent else f"{value:.3g}"
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value)}" class="tick end">{mark}</text>')
    for step in dict.fromkeys((first, last)):
        anchor = "end" if step == last > first else "start"
        parts.append(f'<text x="{x(step)}" y="{_HEIGHT - 14}" class="tick" text-anchor="{anchor}">{step:g}</text>')
    for number, curve in curves.items():
        colour = COLOURS[number % len(COLOURS)]
        for step, bottom, top in bars.get(number, ()):
            parts.append(f'<line x1="{x(step)}" x2="{x(step)}" y1="{y(bottom)}" y2="{y(top)}" stroke="{colour}"/>')
        drawn = _thinned(curve)
        if len(drawn) < 3 or number in bars:
            parts += [f'<circle cx="{x(a)}" cy="{y(b)}" r="2.5" fill="{colour}"/>' for a, b in drawn]
        lines = [(drawn, 'stroke-width="1.5"')]
        if len(curve) > _SMOOTH_ABOVE_STEPS and number not in bars:
            steps, values = np.array(curve).T
            bold = _thinned(list(zip(steps, running_mean(values, len(curve) // 20), strict=True)))
            lines = [(drawn, 'stroke-width="0.7" opacity="0.35"'), (bold, 'stroke-width="1.8"')]
        for line, how in lines:
            path = " ".join(f"{x(a)},{y(b)}" for a, b in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" {how}/>')
    return "\n".join([*parts, "</svg>"])


def _bounds(values: Sequence[float], log: bool) -> tuple[float, float]:
    low, high = _scaled(min(values), log), _scaled(max(values), log)
    if not log:
        low = min(low, 0.0)
    return (low, high) if high - low > _LEAST else (low - 0.5, high + 0.5)


def _drawable(*values: float) -> bool:
    """Returns whether all values are finite and small enough that arithmetic on them stays finite."""
    return all(math.isfinite(value) and abs(value) < _MOST for value in values)


def _scaled(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _ticks(low: float, high: float) -> list[float]:
    """Returns three to six round numbers between the bounds, for the marks of an axis."""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) < 6)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _thinned(curve: Sequence[Point]) -> list[Point]:
    size = math.ceil(len(curve) / _MOST_POINTS)
    parts = [curve[at : at + size] for at in range(0, len(curve), size)]
    return [(sum(a for a, _ in part) / len(part), sum(b for _, b in part) / len(part)) for part in parts]


# A curve with more steps than this is drawn faintly, below its running mean over a twentieth of the steps.
_SMOOTH_ABOVE_STEPS = 60


def plot_curves(
    metrics: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path, title: str, ylabel: str, log: bool = False
) -> Path | None:
    """Draws the named metrics over the steps as a PNG file, and returns its path.

    metrics: rows such as `{"step": 10, "reward_mean": 0.41}`. A row that lacks a name adds no point to that curve, and a name that
    no row has adds no curve. Without any curve nothing is drawn, and None is returned. log: a logarithmic scale, unless no value is
    positive.

    Raises UserError if matplotlib is not installed, StorageError if the disk is full.
    """
    curves = {name: [(row["step"], row[name]) for row in metrics if name in row] for name in names}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"plots need matplotlib, which is not installed; run: {how_to_install('report')}") from error

    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    xlabel = "step"
    for name, colour in zip(curves, COLOURS * (1 + len(curves) // len(COLOURS)), strict=False):
        steps, values = np.array(curves[name], dtype=np.float64).T
        if len(steps) <= _SMOOTH_ABOVE_STEPS:
            marker = "o" if len(steps) < 3 else ""
            axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, label=name)
        else:
            window = len(steps) // 20
            axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
            axes.plot(steps, running_mean(values, window), color=colour, linewidth=1.8, label=name)
            xlabel = "step (bold: running mean over a twentieth of the steps)"
    every = np.concatenate([np.array(points)[:, 1] for points in curves.values()])
    if log and (every > 0).any():
        axes.set_yscale("log", nonpositive="mask")
    elif (every >= 0).all():
        axes.set_ylim(bottom=0, top=None if every.any() else 1)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    return path


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns for each value the mean of it and the `window - 1` values before it (fewer at the start)."""
    sums = np.cumsum(values)
    sums[window:] -= sums[:-window].copy()
    return sums / np.minimum(np.arange(1, len(values) + 1), window)
