"""Checks of found faults: what takes long, or says nothing meanwhile."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
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


def _nmoe(*arguments: str, **variables: str) -> tuple[str, float]:
    """What `nmoe` prints on both streams, and its CPU seconds."""
    before = os.times()
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | variables
    environment["PYTHONUNBUFFERED"] = "1"
    command = [sys.executable, "-m", "nmoe", *arguments]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return done.stdout, used


@check(
    5,
    "the first run on a machine: what it says before it compiles, and when",
    "a line says so before step 1, whose time has no compiling",
)
def first_run_compiles() -> Result:
    Path("problems.toml").write_text(
        '[run]\nsteps = 2\n[model]\ntokenizer = "bytes"\n[model.shape]\nhidden_size = 32\nlayers = 1\nheads = 2\nkv_heads = 2\n'
        'head_dim = 16\nintermediate_size = 64\ncontext_tokens = 64\n[environment]\npath = "sort"\nformat = "boxed"\n'
        "[sampling]\nmax_new_tokens = 8\n[batch]\nprompts_per_step = 2\ngroup_size = 2\n"
    )
    said, _ = _nmoe("rl", "train", "problems.toml", XDG_CACHE_HOME=os.getcwd())
    lines = said.splitlines()
    announced = next((at for at, line in enumerate(lines) if line.startswith("compiling the C++ kernels")), None)
    first = next((at for at, line in enumerate(lines) if " 1/2 " in line), None)
    if first is None:
        return f"no step: {lines[-1]}", False
    rows = [json.loads(line) for line in next(Path("runs").glob("*/metrics.jsonl")).read_text().splitlines()]
    step = rows[0]["time_step_s"]
    when = "no line" if announced is None else f"a line {'before' if announced < first else 'after'} step 1"
    return (
        f"{when}, which takes {'less' if step < 5 else 'more'} than 5 s",
        announced is not None and announced < first and step < 5,
    )


@check(
    6,
    "nmoe preflight of a model and a data set of the hub without a network",
    "no line of the hub's client; data or hub, model, memory and device looked at, in 10 s",
)
def preflight_without_a_network() -> Result:
    began = time.monotonic()
    said, _ = _nmoe("preflight", "qwen3_0.6b", HF_HOME=os.getcwd(), HF_ENDPOINT="http://127.0.0.1:9")
    seconds = time.monotonic() - began
    raw = said.count("thrown while requesting") + said.count("Retrying in")
    seen = {line.split()[1] for line in said.splitlines() if line.startswith(("ok ", "warn", "fail"))}
    looked = seen & {"hub", "model", "memory", "device"}
    line = f"{raw} lines of the client, {len(looked)} of 4 looked at, {'less' if seconds < 10 else 'more'} than 10 s"
    return line, raw == 0 and len(looked) == 4 and seconds < 10


@check(6, "nmoe report of a run of 200 steps", "at most 5 CPU seconds")
def report_of_200_steps() -> Result:
    run = Path("run")
    run.mkdir()
    (run / "config.toml").write_text('[run]\nname = "run"\n')
    (run / "provenance.json").write_text(json.dumps({"threads": 2, "resumed": []}))
    names = "reward_mean correctness format_ok loss response_length_mean entropy_mean entropy_p10 mismatch_abs_mean grad_norm"
    rows = [{"step": step, **dict.fromkeys(names.split(), (step * 7919 % 1000 + 1) / 1000)} for step in range(1, 201)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, seconds = _nmoe("report", "run", MPLCONFIGDIR=os.getcwd())
    return ("at most 5" if seconds <= 5 else f"{seconds:.0f}") + " CPU seconds", "report.md" in said and seconds <= 5
