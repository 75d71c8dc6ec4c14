"""Times the rules of [monitor], the measurement of updates and the sinks: their CPU seconds, and the whole run's.

    python benchmarks/watching.py runs/speedrun/base --steps 40

All rules watch, and the sinks csv and tensorboard take every step. Each part's CPU time is read from the clock of its own thread
(`time.thread_time`), so that what else runs on the machine does not count. Writes benchmarks/results/watching.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine
from result_files import write_results

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run_with
from nmoe.monitor.monitor import Monitor
from nmoe.rl import update
from nmoe.rl.launch import train
from nmoe.runs.sinks.sinks import Feed, Sinks

RESULTS = Path(__file__).parent / "results" / "watching.json"
SINKS = ["csv", "tensorboard"]


def timed(owner: Any, method: str, name: Callable[[Any], str], seconds: dict[str, float]) -> None:
    """Adds the CPU time of each call of a method or of a module's function, on the thread that calls it, to `seconds`."""
    inner = getattr(owner, method)

    def call(self: Any, *arguments: Any, **more: Any) -> Any:
        began = time.thread_time()
        try:
            return inner(self, *arguments, **more)
        finally:
            seconds[name(self)] += time.thread_time() - began

    setattr(owner, method, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("base", help="the speedrun's base")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    seconds: dict[str, float] = defaultdict(float)
    timed(Monitor, "observe", lambda _: "rules", seconds)
    timed(update, "effect", lambda _: "what updates changed", seconds)
    timed(Sinks, "write", lambda _: "queues", seconds)
    timed(Feed, "_serve", lambda feed: f"sink {feed.name}", seconds)
    with tempfile.TemporaryDirectory() as directory:
        own = {
            "run": {"directory": directory, "steps": arguments.steps},
            "model": {"path": arguments.base},
            "sinks": {"to": SINKS},
        }
        config = load_run_with(Path("speedrun"), RLConfig, own, "benchmark", "rl")
        began = time.process_time()
        run = train(config)
        whole = time.process_time() - began
        steps = len((run / "metrics.jsonl").read_text().splitlines())
    share = sum(seconds.values()) / whole
    result = {
        "benchmark": "watching",
        "steps": steps,
        "cpu_seconds": round(whole, 2),
        "parts_cpu_seconds": {name: round(value, 4) for name, value in sorted(seconds.items())},
        "share": round(share, 5),
        "date": time.strftime("%Y-%m-%d"),
        **machine(),
    }
    write_results(RESULTS, result)
    print(json.dumps(result))
    if share > 0.02:
        raise SystemExit(f"watching takes {share:.1%} of the run's CPU seconds, and 2% is allowed")


if __name__ == "__main__":
    main()
