"""Measures how RL learns to fix planted faults, from one base and several seeds: the share of held-out faults that are fixed.

    python benchmarks/code_fix.py                                   makes what is missing, then five seeds
    python benchmarks/code_fix.py --seeds 3 --options=--sandbox.level=landlock
    python benchmarks/code_fix.py --show                            only print what was measured so far

Neither the base nor RL trains on the modules of the held-out faults, in any form. Each evaluation samples one episode per fault at
temperature 1. Results are kept in benchmarks/results/code_fix.json; a seed that is there, of the same configuration, is not run
again. CPU seconds are those of the run, its evaluations and its sandboxes; one that is killed with its sandbox at work is not
among them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from machine import machine, versions
from result_files import Record, read_records, write_records

from nmoe.config.packaged import CONFIGS, ENVIRONMENTS
from nmoe.runs.ledger import read_metrics

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/code_fix.json"
RUNS = ROOT / "runs/code_fix"
FILES = (CONFIGS / "code_fix.toml", CONFIGS / "code_fix_base.toml", ENVIRONMENTS / "code_fix.toml")
CODE = ("nmoe/envs/tasks/code_fix.py", "nmoe/envs/tasks/mutants.py", "nmoe/speedrun/fixes.py")


def run(*command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if code := subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode:
        sys.exit(f"{' '.join(command)} ended with {code}")


def nmoe(*arguments: str) -> None:
    run("-c", "from nmoe.cli import main; main()", *arguments)


def configuration() -> str:
    """12 hexadecimal digits over what decides the result."""
    settings = [tomllib.loads(path.read_text()) for path in FILES]
    texts = [json.dumps(settings), *((ROOT / path).read_text() for path in CODE)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def curve(directory: Path) -> dict[str, float]:
    """The share of held-out faults that are fixed, by step."""
    found = {}
    for path in sorted((directory / "eval").glob("*.json")):
        evaluation = json.loads(path.read_text())
        found[str(evaluation["step"])] = evaluation["results"][0]["value"]
    return dict(sorted(found.items(), key=lambda one: int(one[0])))


def measure(seed: int, options: list[str]) -> Record:
    where, name = machine(), f"rl_seed{seed}"
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    nmoe("rl", "train", "code_fix", f"--run.seed={seed}", f"--run.name={name}", *options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = read_metrics(RUNS / name)
    return {
        "seed": seed,
        "configuration": configuration(),
        **where,
        **versions("torch"),
        "options": " ".join(options),
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "held_out": curve(RUNS / name),
        "training": [round(row["correctness"], 3) for row in rows],
        "last_stage": int(rows[-1]["curriculum_stage"]),
    }


def show(records: list[Record]) -> None:
    print("| seed | held out, by step | gain | CPU s |\n|---:|---|---:|---:|")
    gains, starts = [], []
    for record in records:
        first, *_, last = rates = list(record["held_out"].values())
        gains.append(100 * (last - first))
        starts.append(100 * first)
        print(
            f"| {record['seed']} | {' '.join(f'{rate:.1%}' for rate in rates)} | {gains[-1]:+.1f} | {record['cpu_s']:.0f} |"
        )
    if gains:
        print(f"gain: median {statistics.median(gains):+.1f} points, worst {min(gains):+.1f}")
        print(f"at the start {min(starts):.1f} to {max(starts):.1f}%")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)), help="only these (default: 0 to 4)")
    parser.add_argument("--options", nargs="*", default=[], help="more options of `nmoe rl train`")
    parser.add_argument("--show", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    if not arguments.show:
        if not (RUNS / "corpus.jsonl").exists():
            run("-m", "nmoe.speedrun.fixes")
        if not (RUNS / "base/checkpoints/latest").exists():
            nmoe("pretrain", "code_fix_base")
        for seed in arguments.seeds:
            done = [record for record in read_records(RESULTS) if record["configuration"] == configuration()]
            if all(record["seed"] != seed for record in done):
                write_records(RESULTS, sorted([*done, measure(seed, arguments.options)], key=lambda one: one["seed"]))
    show([record for record in read_records(RESULTS) if record["configuration"] == configuration()])


if __name__ == "__main__":
    main()
