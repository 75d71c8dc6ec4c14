"""Repeats the speedrun of a released model from several seeds: what it comes to at worst, not at best.

    python benchmarks/real_seeds.py --threads 1                  seeds 0 to 4, one after another, on one thread
    python benchmarks/real_seeds.py --threads 2 --seeds 0 1
    python benchmarks/real_seeds.py --show                        only print what was measured so far

Each seed is `nmoe speedrun --real --seed N` in a process of its own. The seed decides which problems are trained on, in which
order, what is sampled, and which held-out problems are asked. CORE's lambada is read below $NMOE_DATASETS.

Results are kept in benchmarks/results/real_seeds.json, a record for each seed and thread count, with the processor, its
calibration (benchmarks/machine.py), wall and CPU seconds. What is there, of the same recipe (`recipe`, a hash of
configuration and environment), is not run again; one that was broken off goes on where it stopped. Reports, metrics and
examinations stay in --out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from machine import machine, versions

from nmoe.config.packaged import find_environment, packaged_configuration

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/real_seeds.json"

Record = dict[str, Any]


@cache
def recipe() -> str:
    """12 hexadecimal digits over the configuration and its environment, without their comments. [checkpoint] is left out:
    it decides what is written, and nothing of what is learned."""
    path = packaged_configuration("speedrun_real")
    configuration = tomllib.loads(path.read_text())
    environment = find_environment(configuration["environment"]["path"], path.parent)
    del configuration["checkpoint"]
    settings = json.dumps([configuration, tomllib.loads(environment.read_text())], sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()[:12]


def run(seed: int, threads: int, out: Path) -> Record:
    """The record of one speedrun, which may have been begun before. Ends this process where it failed or ran on other threads."""
    options = ["--real", "--seed", str(seed), "--out", str(out)]
    if (out / "stages.json").exists():
        options.append("--resume")
    command = [sys.executable, "-c", "from nmoe.cli import main; main()", "speedrun", *options]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    where = machine()
    with out.with_suffix(".log").open("a") as log:
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
    if code not in (0, 1) or not (out / "summary.json").exists():
        sys.exit(f"seed {seed} ended with {code}; see {out.with_suffix('.log')}")
    taken = json.loads((out / "rl/provenance.json").read_text())["threads"]
    if taken != threads:
        sys.exit(f"{out}: ran on {taken} threads where {threads} were asked for; remove it and run this again")
    summary = json.loads((out / "summary.json").read_text())
    return {
        "recipe": recipe(),
        **where,
        "threads": threads,
        **versions("torch"),
        "kept_every_promise": code == 0,
        **summary,
    }


def read() -> list[Record]:
    """The records of today's recipe."""
    records: list[Record] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return [record for record in records if record["recipe"] == recipe()]


def which(record: Record) -> tuple[int, int]:
    """What a record is of: seed and threads."""
    return record["seed"], record["threads"]


def keep(record: Record) -> None:
    """Adds a record in place of one of another recipe or of the same run."""
    records = sorted([*(one for one in read() if which(one) != which(record)), record], key=which)
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")


def tasks(record: Record) -> list[str]:
    """The tasks that a record has figures of."""
    return [name.removeprefix("problems_") for name in record if name.startswith("problems_")]


def show(records: Sequence[Record]) -> None:
    """Median and worst of each task over the seeds, and what each seed came to."""
    if not records:
        print("nothing was measured of this recipe")
        return

    def line(name: str, figure: str, low_is_worse: bool = True) -> None:
        values = [record[figure] for record in records if figure in record]
        if values:
            worst = min(values) if low_is_worse else max(values)
            print(f"  {name:48} median {statistics.median(values):9.4g}   worst {worst:9.4g}   of {len(values)}")

    print(f"{len(records)} seeds, recipe {records[0]['recipe']}")
    for task in tasks(records[0]):
        line(f"{task}: chance", f"chance_{task}", low_is_worse=False)
        line(f"{task}: right, base", f"base_{task}")
        line(f"{task}: right, trained", f"trained_{task}")
        line(f"{task}: gain", f"gain_{task}")
        line(f"{task}: gain, lower bound", f"gain_{task}_low")
        for who in ("base", "trained"):
            line(f"{task}: in form, {who}", f"{who}_in_form_{task}")
            line(f"{task}: right given form, {who}", f"{who}_given_form_{task}")
        line(f"{task}: gain on problems in form both times", f"gain_given_form_{task}")
    for name in ("perplexity_ratio", "mismatch_of_bound", "rl_steps", "cpu_s", "wall_s", "peak_memory_mb"):
        line(name, name, low_is_worse=False)
    for record in records:
        right = ", ".join(
            f"{task} {record[f'base_{task}']:.3f} -> {record[f'trained_{task}']:.3f}" for task in tasks(record)
        )
        print(
            f"  seed {record['seed']}: {right}; {record['rl_steps']} steps, {record['cpu_s']:.0f} s CPU, "
            f"{record['wall_s']:.0f} s wall, {record['threads']} threads, calibration {record['calibration_s']:.3f}, "
            f"{record['cpu']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)), help="which seeds (default: 0 to 4)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run (default: 1)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/real_seeds", help="where the runs go")
    parser.add_argument("--show", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    for seed in [] if arguments.show else arguments.seeds:
        if any(which(record) == (seed, arguments.threads) for record in read()):
            continue
        out = arguments.out / f"{recipe()}-{seed}-{arguments.threads}"
        record = run(seed, arguments.threads, out)
        keep(record)
        show([record])
        # What is large and can be had again.
        for made in ("model", "rl/checkpoints"):
            shutil.rmtree(out / made)
    show(read())


if __name__ == "__main__":
    main()
