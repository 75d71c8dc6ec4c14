"""Runs the rules of [monitor] over recorded runs and prints their alerts: false alarms, if the runs were healthy.

    python benchmarks/alarms.py runs/speedrun/rl runs/other
    python benchmarks/alarms.py --record runs/seeds/*/rl

A run is its directory, with config.toml, metrics.jsonl and eval/. `--record` writes the counts by rule to
benchmarks/results/alarms.json and, beside the delays that `faults.py` measures, into the table of docs/playbook.md.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from nmoe.config.commands import COMMANDS
from nmoe.config.kinds import command_for
from nmoe.config.loader import load_run
from nmoe.monitor.rules import monitor_of
from nmoe.runs.ledger import Ledger, read_metrics

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "alarms.json"
PLAYBOOK = ROOT / "docs" / "playbook.md"
_BEGIN, _END = "<!-- alarms: benchmarks/faults.py, benchmarks/alarms.py -->\n", "<!-- /alarms -->\n"


def said(run: Path) -> tuple[int, float, list[tuple[int, str, str]]]:
    """The number of steps, CPU seconds of the rules, and their alerts (step, rule, message)."""
    rows, probes = read_metrics(run), Ledger(run).probed()
    loads = next((value for name, value in rows[0].items() if name.startswith("expert_load/")), [])
    file = run / "config.toml"
    monitor = monitor_of(load_run(file, COMMANDS[command_for(file)]), len(loads), run)
    began, alerts = time.process_time(), []
    for row in rows:
        seen = monitor.observe(row, probes.get(row["step"]))
        alerts += [(row["step"], alert.rule, str(alert)) for alert in seen if alert.remedies]
    return len(rows), time.process_time() - began, alerts


def record(part: str, found: Any) -> None:
    """Puts a part of the results into the file, and both into the playbook's table."""
    from machine import machine  # measures for a second
    from result_files import write_results

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"benchmark": "alarms"}
    results |= {part: found, f"{part}_date": time.strftime("%Y-%m-%d"), f"{part}_machine": machine()}
    write_results(RESULTS, results)
    page = PLAYBOOK.read_text()
    before, rest = page.split(_BEGIN)
    PLAYBOOK.write_text(before + _BEGIN + table(results) + _END + rest.split(_END)[1])


def table(results: dict[str, Any]) -> str:
    """The delay of each rule on its fault, and its false alarms on healthy runs."""
    healthy = results.get("healthy", {"runs": {}, "alarms": {}})
    runs, alarms = healthy["runs"], healthy["alarms"]
    lines = ["| rule | fault | begins at step | fires after | promised | false alarms |", "|---|---|---|---|---|---|"]
    for one in results.get("faults", []):
        after = f"{one['delay']} {one['unit']}"
        shown = alarms.get(one["rule"], 0)
        lines.append(f"| `{one['rule']}` | {one['what']} | {one['begins']} | {after} | {one['window']} | {shown} |")
    steps = sum(runs.values())
    closing = f"False alarms are alerts on {len(runs)} healthy recorded runs, {steps:,} steps in all: {listed(runs)}."
    return "\n".join([*lines, "", closing, "", *real_table(results.get("real"))])


def real_table(real: dict[str, Any] | None) -> list[str]:
    """What `mismatch` finds on a real model, and its level in the healthy run."""
    if real is None:
        return []
    lines = [
        "| an engine that is not the learner, on a real model | policy | entropy | mismatch, mean | `mismatch` fires after |",
        "|---|---|---:|---:|---|",
    ]
    for part, what in (("first", "nothing"), ("last", "nothing")):
        entropy, level = real[f"{part}_entropy_mean"], real[f"{part}_mismatch_abs_mean"]
        lines.append(f"| {what} | {part} 5 of {real['steps']} steps | {entropy:.2f} | {level:.3f} | |")
    for one in real["faults"]:
        after = f"not in {one['steps']} steps" if one["delay"] is None else f"{one['delay']} steps"
        kind = "base" if one["policy"] == "base" else f"after {real['steps']} steps"
        lines.append(
            f"| {one['what']} | {kind} | {one['entropy_mean']:.2f} | {one['mismatch_abs_mean']:.3f} | {after} |"
        )
    said = "nothing" if not real["alarms"] else "; ".join(real["alarms"])
    closing = f"The healthy run of {real['model']} ({real['steps']} steps, bfloat16) set off: {said}."
    return [*lines, "", closing, ""]


def named(run: Path) -> str:
    """What a run is: the name in its configuration, without a seed, such as `rl` of the speedrun."""
    with (run / "config.toml").open("rb") as file:
        name: str = tomllib.load(file)["run"]["name"]
    return name.partition("_seed")[0]


def listed(runs: dict[str, int]) -> str:
    """The runs by recipe: `5 of sort_grpo (500 steps)`."""
    kinds: dict[str, list[int]] = {}
    for name, steps in runs.items():
        kinds.setdefault(name.partition(" ")[0], []).append(steps)
    return ", ".join(f"{len(steps)} of {kind} ({sum(steps):,} steps)" for kind, steps in sorted(kinds.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    parser.add_argument("--record", action="store_true", help="write the counts to the results and the playbook")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    lengths: dict[str, int] = {}
    for run in arguments.runs:
        steps, seconds, alerts = said(run)
        counts.update(rule for _, rule, _ in alerts)
        lengths[f"{named(run)} {run.name}"] = steps
        print(f"{run}: {steps} steps, {len(alerts)} alerts, {1000 * seconds / steps:.2f} ms of CPU a step")
        print(*(f"  step {step}: {alert}" for step, _, alert in alerts), sep="\n", end="\n" if alerts else "")
    print(f"{counts.total()} alerts")
    if arguments.record:
        record("healthy", {"runs": lengths, "alarms": dict(counts)})


if __name__ == "__main__":
    main()
