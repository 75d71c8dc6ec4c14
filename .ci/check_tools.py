"""Holds the run of configs/tools.toml against what the README promises: `python .ci/check_tools.py runs/speedrun/tools`"""

import json
import sys
from pathlib import Path
from statistics import fmean

from holding import hold

LAST_STEPS = 5

run = Path(sys.argv[1])
steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
(greedy,) = json.loads(max((run / "eval").iterdir()).read_text())["results"]
hold(
    {
        "tool_use_ok, sampled": (fmean(step["tool_use_ok"] for step in steps[-LAST_STEPS:]), 0.9, 1.0),
        "correctness, sampled": (fmean(step["correctness"] for step in steps[-LAST_STEPS:]), 0.9, 1.0),
        "held-out correctness, greedy": (greedy["value"], 0.9, 1.0),
        "correctness of the first step": (steps[0]["correctness"], 0.0, 0.5),
        "mismatch_abs_mean": (
            max(step["mismatch_abs_mean"] for step in steps if "mismatch_abs_mean" in step),
            0.0,
            1e-6,
        ),
        "seconds of all steps": (sum(step["time_step_s"] for step in steps), 0.0, 600.0),
    },
    [run.with_name("tools_base"), run],
)
