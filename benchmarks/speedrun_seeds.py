"""Runs the speedrun from many seeds and kernels, and prints median and worst.

    python benchmarks/speedrun_seeds.py --threads 2             those of README's 20 bases that run on two threads
    taskset -c 0 python benchmarks/speedrun_seeds.py --threads 1    the others, on one core; the same with -c 1 beside it
    python benchmarks/speedrun_seeds.py --seeds 3 4 --kernels avx2
    python benchmarks/speedrun_seeds.py --show              only print what was measured so far

Each base is `nmoe speedrun --scratch --seed N` in a process of its own, with the settings that everybody has: on as many threads as
it may use cores. One machine plays several: `avx2` holds torch, oneDNN, MKL and the C++ kernels to
AVX2, as on an older processor, and `plain` runs as where there is no C++ compiler. Other rounding makes another base of the same
seed. Of one seed, kernels and thread count, several AMD EPYC processors made the same numbers.

Results are kept in benchmarks/results/speedrun_seeds.json, a record for each seed, kernels and thread count, with the
processor, its calibration (benchmarks/machine.py), wall and CPU seconds. A base that is there, of the same recipe (`recipe`, a
hash of what decides the result), is not run again; one that was broken off goes on where it stopped. Several processes may
share the work: each takes what no other has begun.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from machine import calibration_s, machine, versions
from result_files import Record, read_records, write_records

from nmoe.config.packaged import CONFIGS, ENVIRONMENTS
from nmoe.speedrun.corpus import corpus_texts, write_corpus
from nmoe.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/speedrun_seeds.json"
KERNELS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    # No compiler: the C++ kernels are off, and torch's operations run in their place.
    "plain": {"CXX": "/nonexistent/c++"},
}
SKILLS = ("add", "reverse", "sort")
# Seed, kernels, threads: every fourth seed under AVX2, every fourth without the project's kernels, eight on two threads.
PLAN = [(seed, {1: "avx2", 3: "plain"}.get(seed % 4, "native"), 2 if seed % 8 >= 4 else 1) for seed in range(20)]
# The settings that decide a result; the corpus does, too.
_SETTINGS = (CONFIGS / "speedrun.toml", CONFIGS / "speedrun_base.toml", ENVIRONMENTS / "skills.toml")

FIGURES = (
    *(f"{prefix}{stage}" for prefix in ("greedy_", "pass16_", "ood_") for stage in ("base", "trained")),
    *(f"correctness_{stage}_{skill}" for stage in ("base", "trained") for skill in SKILLS),
    *("base_correctness", "trained_correctness", "base_format_ok", "format_ok", "mismatch_abs_max"),
    *("rl_steps", "wall_s", "cpu_s", "peak_memory_mb"),
)
"""What is kept of a speedrun's summary."""


@cache
def recipe() -> str:
    """12 hexadecimal digits over the settings, the first documents of a corpus and which checkpoint is examined: the recipe,
    however its code is written."""
    settings: list[Any] = [as_measured(tomllib.loads(path.read_text())) for path in _SETTINGS]
    settings.append({"examined": "best"})
    with tempfile.TemporaryDirectory() as directory:
        corpus = Path(directory) / "corpus.jsonl"
        write_corpus(corpus, Tokenizer.train(corpus_texts(0, 500), 400), 0, 500)
        return hashlib.sha256(json.dumps(settings).encode() + corpus.read_bytes()).hexdigest()[:12]


def as_measured(settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration with its one [[eval]] as the [eval] that it was written as when most records were measured: the same
    evaluations in another form."""
    return {key: value[0] if key == "eval" and len(value) == 1 else value for key, value in settings.items()}


def run(seed: int, kernels: str, threads: int, out: Path) -> Record:
    """The record of one speedrun, which may have been begun before. Ends this process where it ran on other threads."""
    command = [
        sys.executable,
        "-c",
        "from nmoe.cli import main; main()",
        "speedrun",
        "--scratch",
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]
    if (out / "stages.json").exists():
        command.append("--resume")
    environment = {**os.environ, **KERNELS[kernels], "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    out.parent.mkdir(parents=True, exist_ok=True)
    where = machine()
    with out.with_suffix(".log").open("a") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
    if code not in (0, 1) or not (out / "summary.json").exists():
        sys.exit(f"seed {seed} with {kernels} kernels ended with {code}; see {out.with_suffix('.log')}")
    summary = json.loads((out / "summary.json").read_text())
    for stage in ("base", "rl"):
        taken = json.loads((out / stage / "provenance.json").read_text())["threads"]
        if taken != threads:
            wanted = "two cores" if threads == 2 else "one core, as by `taskset -c 0`"
            sys.exit(
                f"{out / stage}: ran on {taken} threads where {threads} were planned; remove it, and run this on {wanted}"
            )
    return {
        "seed": seed,
        "kernels": kernels,
        "recipe": recipe(),
        **where,
        "threads": threads,
        **versions("torch"),
        "kept_every_promise": code == 0,
        **{name: summary[name] for name in FIGURES},
    }


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read() -> list[Record]:
    """The records of this recipe."""
    return [record for record in read_records(RESULTS) if record["recipe"] == recipe()]


def which(record: Record) -> tuple[int, str, int]:
    """Its place in the plan."""
    return record["seed"], record["kernels"], record["threads"]


def keep(record: Record) -> None:
    """Adds a record in place of those of other recipes and of the same base."""
    with _locked(RESULTS.with_suffix(".lock")):
        records = sorted([*(one for one in read() if which(one) != which(record)), record], key=which)
        write_records(RESULTS, records)


def show(records: Sequence[Record]) -> None:
    """Median and worst over the bases, and each of them."""
    if not records:
        print("nothing was measured of this recipe")
        return
    print(f"{len(records)} bases, recipe {recipe()}")
    names = ["base_correctness", "trained_correctness", *(f"correctness_trained_{skill}" for skill in SKILLS)]
    names += ["greedy_trained", "format_ok", "rl_steps", "wall_s", "cpu_s", "peak_memory_mb"]
    low_is_worse = {"base_correctness", "format_ok", *(name for name in names if "trained" in name)}
    for name in names:
        values = sorted((record[name] for record in records), reverse=name in low_is_worse)
        print(f"  {name:28} median {statistics.median(values):9.4g}   worst {values[-1]:9.4g}   best {values[0]:9.4g}")
    print(f"  trained >= 0.90: {sum(record['trained_correctness'] >= 0.9 for record in records)} of {len(records)}")
    for record in records:
        skills = " ".join(f"{skill} {record[f'correctness_trained_{skill}']:.3f}" for skill in SKILLS)
        print(
            f"  seed {record['seed']:2} {record['kernels']:6} {record['threads']} base {record['base_correctness']:.3f} trained "
            f"{record['trained_correctness']:.3f} ({skills}) {record['rl_steps']:3} steps, {record['wall_s']:.0f} s wall, "
            f"{record['cpu_s']:.0f} s CPU, calibration {record['calibration_s']:.3f}, {record['cpu']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", help="only these seeds (default: the plan of 20)")
    parser.add_argument("--kernels", choices=KERNELS, help="with these kernels (default: as the plan has it)")
    parser.add_argument("--threads", type=int, choices=(1, 2), help="only those that the plan has on so many threads")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/seeds", help="where the runs go")
    parser.add_argument("--show", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    if not arguments.show:
        seeds = arguments.seeds or range(len(PLAN))
        planned = [(seed, *PLAN[seed % len(PLAN)][1:]) for seed in seeds]
        wanted = [(seed, arguments.kernels or kernels, threads) for seed, kernels, threads in planned]
        print(f"calibration: {calibration_s():.3f} CPU seconds")
        arguments.out.mkdir(parents=True, exist_ok=True)
        for seed, kernels, threads in wanted:
            if arguments.threads not in (None, threads) or any(
                which(one) == (seed, kernels, threads) for one in read()
            ):
                continue
            out = arguments.out / f"{recipe()}-{seed}-{kernels}-{threads}"
            with out.with_suffix(".claim").open("a") as claim:
                try:
                    fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # another process is at it
                record = run(seed, kernels, threads, out)
                keep(record)
                show([record])
                shutil.rmtree(out)
    show(read())


if __name__ == "__main__":
    main()
