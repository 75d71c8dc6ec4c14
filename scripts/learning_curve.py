"""Draws a learning curve from a run: correctness and format of each step, and the held-out evaluations.

python scripts/learning_curve.py runs/real/rl docs/images/learning_curve.svg
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from nmoe.runs.ledger import read_metrics


def draw(run: Path, picture: Path) -> None:
    """Writes `picture` (SVG) from the run's metrics and evaluations."""
    rows = read_metrics(run)
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, [row["format_ok"] for row in rows], color="#E69F00", linewidth=1.4, label="in the required format")
    axes.plot(steps, [row["correctness"] for row in rows], color="#0072B2", linewidth=1.6, label="correct, in training")
    evaluated = [json.loads(path.read_text()) for path in sorted((run / "eval").glob("step_*.json"))]
    first = [(one["step"], one["results"][0]) for one in evaluated]
    values = [result["value"] for _, result in first]
    spread = [[r["value"] - r["low"] for _, r in first], [r["high"] - r["value"] for _, r in first]]
    axes.errorbar(
        [step for step, _ in first],
        values,
        yerr=spread,
        fmt="o",
        color="#D55E00",
        capsize=3,
        label="correct, held-out problems (95% interval)",
    )
    batch = tomllib.loads((run / "config.toml").read_text())["batch"]
    samples = batch["prompts_per_step"] * batch["group_size"]
    axes.set(xlabel=f"RL step ({samples} samples each)", ylabel="share of samples", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    # The same run gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "nmoe", "svg.fonttype": "none"}):
        figure.savefig(picture, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
