"""Checks of found faults: what takes long, or says nothing meanwhile."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from found import Result, check

_STEPS = """
import json, sys, time
from rl_step import steps
print(json.dumps([one["sampling"] + one["learning"] for one in steps(3, time.perf_counter)]))
"""


@check(
    4,
    "a step of reinforcement learning beside two busy processes, on two threads and on one",
    "two threads take at most twice as long as one",
)
def two_threads_beside_others() -> Result:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    seconds: dict[int, list[float]] = {1: [], 2: []}
    try:
        for threads in (1, 2, 2, 1):
            benchmarks = str(Path(__file__).parents[1])
            environment = os.environ | {
                "OMP_NUM_THREADS": str(threads),
                "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], benchmarks]),
            }
            done = subprocess.run(
                [sys.executable, "-c", _STEPS], env=environment, check=True, capture_output=True, text=True
            )
            seconds[threads] += json.loads(done.stdout.splitlines()[-1])
    finally:
        for process in busy:
            process.kill()
            process.wait()
    one, two = (statistics.median(seconds[threads]) for threads in (1, 2))
    return f"{two / one:.1f} times as long", two <= 2 * one
