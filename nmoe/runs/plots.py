"""Curves of a run's metrics over its steps, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmoe.errors import UserError
from nmoe.extras import how_to_install
from nmoe.runs.storage import storage_errors
from nmoe.runs.svg import COLOURS

# A curve with more steps than this is drawn faintly, below its running mean over a twentieth of the steps.
_SMOOTH_ABOVE_STEPS = 60


def plot_curves(
    metrics: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path, title: str, ylabel: str, log: bool = False
) -> Path | None:
    """Draws the named metrics over the steps to `path` (PNG), which is returned.

    metrics: rows such as `{"step": 10, "reward_mean": 0.41}`. A row without a name adds no point to that curve, and a
    name that no row has adds no curve. Without any curve nothing is drawn, and None is returned.
    log: a logarithmic scale, unless no value is positive.

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
    """The mean of each value and the `window - 1` values before it, or of as many as there are."""
    sums = np.cumsum(values)
    sums[window:] -= sums[:-window].copy()
    return sums / np.minimum(np.arange(1, len(values) + 1), window)
