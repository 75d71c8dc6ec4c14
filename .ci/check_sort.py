"""Holds runs of configs/sort_grpo.toml and configs/sort_ppo.toml against what docs/algorithms.md promises:
`python .ci/check_sort.py runs/speedrun/sort_grpo runs/speedrun/sort_ppo`"""

import json
import sys
from pathlib import Path
from statistics import fmean

LAST_STEPS = 5

broken = 0
for run in map(Path, sys.argv[1:]):
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (greedy,) = json.loads(max((run / "eval").iterdir()).read_text())["results"]
    figures = {
        "correctness of the first step, sampled": (steps[0]["correctness"], 0.0, 0.3),
        f"correctness of the last {LAST_STEPS} steps, sampled": (
            fmean(step["correctness"] for step in steps[-LAST_STEPS:]),
            0.9,
            1.0,
        ),
        "held-out correctness, greedy": (greedy["value"], 0.9, 1.0),
        "mismatch_abs_mean": (
            max(step["mismatch_abs_mean"] for step in steps if "mismatch_abs_mean" in step),
            0.0,
            1e-6,
        ),
        "seconds of all steps": (sum(step["time_step_s"] for step in steps), 0.0, 600.0),
    }
    if "explained_variance" in steps[-1]:
        figures["explained_variance, mean"] = (fmean(step["explained_variance"] for step in steps), 0.0, 1.0)
    for name, (value, low, high) in figures.items():
        holds = low <= value <= high
        broken += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {run.name}: {name} = {value:.6g}, wanted {low:g} to {high:g}")
sys.exit(1 if broken else 0)
