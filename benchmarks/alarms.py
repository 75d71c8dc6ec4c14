"""Shows the rules of [monitor] recorded runs, and prints what they would have said: false alarms, where the runs were healthy.

    python benchmarks/alarms.py runs/speedrun/rl runs/other

A run is its directory, with config.toml, metrics.jsonl and eval/.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from nmoe.config.commands import load_run
from nmoe.config.commands.rl import RLConfig
from nmoe.monitor.rules import monitor_of
from nmoe.runs.ledger import Ledger, read_metrics


def said(run: Path) -> tuple[int, float, list[str]]:
    """The number of steps, CPU seconds of the rules, and their alerts, of a run of `nmoe rl train`."""
    rows, probes = read_metrics(run), Ledger(run).probes()
    loads = next((value for name, value in rows[0].items() if name.startswith("expert_load/")), [])
    monitor = monitor_of(load_run(run / "config.toml", RLConfig), len(loads), run)
    began, alerts = time.process_time(), []
    for row in rows:
        alerts += [
            f"step {row['step']}: {alert}" for alert in monitor.observe(row, probes.get(row["step"])) if alert.remedies
        ]
    return len(rows), time.process_time() - began, alerts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    total = 0
    for run in parser.parse_args().runs:
        steps, seconds, alerts = said(run)
        total += len(alerts)
        print(f"{run}: {steps} steps, {len(alerts)} alerts, {1000 * seconds / steps:.2f} ms of CPU a step")
        print(*(f"  {alert}" for alert in alerts), sep="\n", end="\n" if alerts else "")
    print(f"{total} alerts")


if __name__ == "__main__":
    main()
