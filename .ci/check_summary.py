"""Holds a speedrun's summary.json against what it promises (`nmoe speedrun` did so already) and what else README says of it, its
time scaled by this machine's calibration: `python .ci/check_summary.py runs/speedrun/summary.json`"""

import json
import sys
from pathlib import Path

from holding import hold

from nmoe.speedrun.promises import SCRATCH_PROMISES

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from machine import calibration_s

# Ten minutes are promised on two cores for which benchmarks/machine.py prints this or less (an AMD EPYC of 2024: 0.19, of 2022:
# 0.25 CPU seconds); slower ones get as much more.
SLOW_CALIBRATION_S = 0.38

summary = json.loads(Path(sys.argv[1]).read_text())
out = Path(sys.argv[1]).parent
slower = max(1.0, calibration_s() / SLOW_CALIBRATION_S)
bounds = {promise.figure: (promise.low, promise.high) for promise in SCRATCH_PROMISES} | {
    "trained_correctness_low": (0.87, 1.0),
    "trained_problems": (1000, float("inf")),
    "greedy_base_reverse": (0.0, 0.4),
    "greedy_trained_reverse": (0.85, 1.0),
    "wall_s": (0.0, 600.0 * slower),
    "peak_memory_mb": (0.0, 4096.0),
}
hold({name: (summary[name], low, high) for name, (low, high) in bounds.items()}, [out / "base", out / "rl"])
