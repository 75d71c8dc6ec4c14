"""Labelled solutions of the speedrun's sums in a format that it does not write itself."""

from __future__ import annotations

import json
from pathlib import Path

from nmoe.speedrun.steps import Split, solutions


def write_stepwise(path: Path, seed: int, count: int, split: Split) -> None:
    """Writes `count` labelled solutions in the format of TRL's stepwise supervision: `prompt`, `completions` and `labels`, true or
    false up to the first wrong step, where the completions end."""
    with path.open("w") as file:
        for solution in solutions(seed, count, split):
            labels = [rating >= 0 for rating in solution.ratings]
            record = {"prompt": solution.question, "completions": solution.steps[: len(labels)], "labels": labels}
            file.write(json.dumps(record) + "\n")
