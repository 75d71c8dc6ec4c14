"""Holds a speedrun's summary.json against what the README promises: `python .ci/check_summary.py runs/speedrun/summary.json`"""

import json
import sys
from pathlib import Path

from holding import hold

BOUNDS = {
    "base_correctness": (0.05, 0.35),
    "trained_correctness": (0.90, 1.0),
    "trained_correctness_low": (0.87, 1.0),
    "trained_problems": (1000, float("inf")),
    "format_ok": (0.98, 1.0),
    "greedy_base_reverse": (0.0, 0.4),
    "greedy_trained_reverse": (0.85, 1.0),
    "mismatch_abs_mean": (0.0, 1e-6),
    "mismatch_abs_max": (0.0, 1e-4),
    "first_step_ppo_kl": (-1e-6, 1e-6),
    "wall_s": (0.0, 600.0),
    "peak_memory_mb": (0.0, 4096.0),
}

summary = json.loads(Path(sys.argv[1]).read_text())
out = Path(sys.argv[1]).parent
hold({name: (summary[name], low, high) for name, (low, high) in BOUNDS.items()}, [out / "base", out / "rl"])
