"""Times a speedrun on two threads beside two other busy processes, and alone.

    python benchmarks/busy_machine.py                       whole speedruns: an hour
    python benchmarks/busy_machine.py --before ../older     those of another checkout, too
    python benchmarks/busy_machine.py --steps 5 --rounds 3  steps of reinforcement learning of the speedrun's size (rl_step.py)

Each side is a process of its own, and the sides take turns. "busy" has two processes beside it that this script starts, which never
rest. Every speedrun has the same seed, so a number of threads gives the same figures on a busy machine, to the last digit. The
script refuses to start where the load of the last minute is above 0.3, and a result counts only if no other program used more than
a tenth of a core meanwhile.

Writes benchmarks/results/busy_machine.json. Exits with 1 if a busy run takes more than 3 times as long as a quiet one, if their
figures differ, or if a quiet run takes more than 3% longer than that of `--before`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import machine, versions
from result_files import write_results

from nmoe.cores import CoreTimes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "busy_machine.json"
THREADS = BUSY = 2
LARGEST_LOAD, LARGEST_USE = 0.3, 0.1
SLOWER_BUSY, SLOWER_QUIET = 3.0, 1.03
# What a summary says of the machine rather than of the model.
_OF_THE_MACHINE = ("wall_s", "cpu_s", "peak_memory_mb")

_STEPS = """
import json, sys, time
sys.path.insert(0, {benchmarks!r})
from rl_step import steps
print(json.dumps(steps({count}, time.perf_counter)))
"""


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that never rest, for the `with` block."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def measured(tree: Path, busy: bool, steps: int) -> dict[str, Any]:
    """One run of a checkout: its seconds, its figures, and the cores that programs which are no part of this used meanwhile."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(THREADS)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, children = CoreTimes.now(), _children_s()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, busy_processes(BUSY if busy else 0):
        out = Path(folder) / "speedrun"
        code = _STEPS.format(benchmarks=str(ROOT / "benchmarks"), count=steps)
        speedrun = ["-m", "nmoe", "speedrun", "--out", str(out)]
        command = [sys.executable, *(["-c", code] if steps else speedrun)]
        done = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if steps:
            rows = json.loads(done.stdout.splitlines()[-1])
            seconds = statistics.median(row["sampling"] + row["learning"] for row in rows)
            figures = {"grad_norm of the last step": rows[-1]["grad_norm"]}
        else:
            summary = json.loads((out / "summary.json").read_text())
            figures = {name: value for name, value in summary.items() if name not in _OF_THE_MACHINE}
    after = CoreTimes.now()
    assert before is not None, "the script needs /proc/stat"
    assert after is not None, "the script needs /proc/stat"
    others = after.used_by_others_since(before) - (_children_s() - children) / (after.clock - before.clock)
    return {"seconds": round(seconds, 3), "others": round(max(0.0, others), 3), "figures": figures}


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def verdicts(sides: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What does not hold, in a line each; nothing if all does."""
    typical = {side: statistics.median(run["seconds"] for run in runs) for side, runs in sides.items()}
    wrong = []
    if (ratio := typical["busy"] / typical["quiet"]) > SLOWER_BUSY:
        wrong.append(
            f"beside {BUSY} busy processes it takes {ratio:.2f} times as long, and {SLOWER_BUSY:g} are allowed"
        )
    if "before" in typical and (ratio := typical["quiet"] / typical["before"]) > SLOWER_QUIET:
        wrong.append(f"alone it takes {ratio:.3f} times as long as before, and {SLOWER_QUIET:g} are allowed")
    figures = [run["figures"] for side in ("quiet", "busy") for run in sides[side]]
    differing = sorted({name for one in figures for name in one if one[name] != figures[0].get(name)})
    if differing:
        wrong.append(f"figures differ between runs: {', '.join(differing)}")
    if (used := max(run["others"] for runs in sides.values() for run in runs)) > LARGEST_USE:
        wrong.append(f"other programs used up to {used:.2f} cores: it is no measurement")
    return wrong


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--before", type=Path, help="a checkout to compare the quiet run with")
    parser.add_argument("--steps", type=int, default=0, help="time so many steps instead of whole speedruns")
    parser.add_argument("--rounds", type=int, default=1, help="each side takes its turn so often")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait at most for the load to fall")
    arguments = parser.parse_args(given)
    until = time.monotonic() + arguments.wait
    while os.getloadavg()[0] > LARGEST_LOAD and time.monotonic() < until:
        time.sleep(5)
    if (load := os.getloadavg()[0]) > LARGEST_LOAD:
        raise SystemExit(f"the load is {load:.2f}, and {LARGEST_LOAD:g} is the most for a measurement; try again later")
    about = {**machine(), **versions("torch"), "threads": THREADS}
    sides: dict[str, list[dict[str, Any]]] = {"quiet": [], "busy": []}
    if arguments.before is not None:
        sides["before"] = []
    for number in range(arguments.rounds):
        for side in list(sides) if number % 2 == 0 else list(reversed(sides)):
            tree = arguments.before.resolve() if side == "before" else ROOT
            sides[side].append(run := measured(tree, side == "busy", arguments.steps))
            print(f"{side:7}{run['seconds']:9.2f} s, others {run['others']:.2f} cores  {run['figures']}", flush=True)
    wrong = verdicts(sides)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    name = f"{arguments.steps} steps" if arguments.steps else "speedrun"
    figures = sides["quiet"][0]["figures"]  # the same in every run, or `wrong` names them
    kept = {
        side: [{"seconds": run["seconds"], "others": run["others"]} for run in runs] for side, runs in sides.items()
    }
    results[name] = {"machine": about, "figures": figures, "sides": kept, "wrong": wrong}
    write_results(RESULTS, results)
    if wrong:
        raise SystemExit("\n".join(wrong))
    print("all as wanted")


if __name__ == "__main__":
    main()
