"""CPU seconds of two commits, side by side: python benchmarks/compare_commits.py [BEFORE [AFTER]]

Each commit runs its own benchmarks in a process of its own, on one thread: `nmoe --help`, decoding, training steps, whole GRPO
steps, grading, and the environment's work per episode (commit_side.py). The two take turns, nine times after one that warms up, and
every other round the other way round, so that whatever else the machine does falls on both. Prints the medians of the processor
time, subprocesses included, and their ratio; the last line is one JSON object. By default AFTER is HEAD, and BEFORE the last commit
before the rooms of nmoe/ were rebuilt; `.` is the working tree.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import commit_side
import reference_decode
from decode_workload import MODELS
from machine import machine
from side import Side

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from commits import BEFORE, checked_out, environment, resolved, subject

ROUNDS = 9


def compared(seconds: list[tuple[float, float]]) -> dict[str, float]:
    """Medians of the two commits and of their ratio round by round, each with its quartiles' distance where that tells of noise:
    compared([(1.0, 1.1), (2.0, 2.2), (1.0, 1.1)]) has a ratio of 1.1."""
    before, after = zip(*seconds, strict=True)
    ratios = [new / old for old, new in seconds]
    first, middle, third = statistics.quantiles(ratios)
    return {
        "before_cpu_s": round(statistics.median(before), 4),
        "after_cpu_s": round(statistics.median(after), 4),
        "ratio": round(statistics.median(after) / statistics.median(before), 3),
        "ratio_of_rounds": round(middle, 3),
        "ratio_quartiles_apart": round(third - first, 3),
    }


def main() -> None:
    commits = list(map(resolved, [*sys.argv[1:], *[BEFORE, "HEAD"][len(sys.argv) - 1 :]]))
    print(f"before: {subject(commits[0])}\nafter:  {subject(commits[1])}", flush=True)
    with ExitStack() as alive:
        checkpoint = Path(alive.enter_context(tempfile.TemporaryDirectory()))
        reference_decode.make_model(MODELS["qwen3_5m"]).save_pretrained(checkpoint)
        trees = [alive.enter_context(checked_out(commit)) for commit in commits]
        sides = [
            alive.enter_context(Side(commit_side.serve, tree, checkpoint, environment=environment(tree)))
            for tree in trees
        ]
        names, others = [side.connection.recv() for side in sides]
        assert names == others
        results = {}
        for name in names:
            rounds: list[tuple[float, float]] = []
            for number in range(ROUNDS + 1):
                order = (0, 1) if number % 2 else (1, 0)
                took = {place: float(sides[place].ask((name, number))) for place in order}
                rounds.append((took[0], took[1]))
            results[name] = compared(rounds[1:])
            print(f"{name:<28} {results[name]}", flush=True)
    print(json.dumps({"commits": [subject(commit) for commit in commits], "cases": results, "machine": machine()}))


if __name__ == "__main__":
    main()
