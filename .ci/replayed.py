"""Makes runs that sample beside their training, kills them and their engine servers at random moments, executes each again in one
process, and counts the bytes of weights that differ:

    python .ci/replayed.py [--runs 20] [--seed 0] [--json RESULTS]

A model drawn at random answers at length, so that publications come while it samples. A run is killed by SIGKILL and gone on with
by --run.resume=true; a server is killed, and started again by the run. Exit code 1 if a byte, or a metric that measures no time,
differs, or if no sample was sampled by several versions of the weights. With --json, runs that RESULTS has are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from machine import machine

from nmoe.text.tokenizer import Tokenizer

STALENESS = (1, 4, 8)
STEPS, PATIENCE_S = 12, 3600.0
RUN = f"""
[run]
name = "run"
directory = "."
steps = {STEPS}
threads = 1

[model]
tokenizer = "tokenizer"
numerics = "exact"

[model.shape]
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
head_dim = 16
experts = 4
experts_per_token = 2
expert_width = 32
context_tokens = 160

[environment]
path = "draw.toml"

[sampling]
max_new_tokens = 96

[batch]
prompts_per_step = 4
group_size = 4

[engine]
kind = "server"
servers = 2
max_sequences = 8

[async]
max_staleness = STALENESS

[optimizer]
learning_rate = 1e-2

[checkpoint]
every_steps = 2
keep = 100

[monitor]
first_steps = "warn"
"""
ENVIRONMENT = """
env_id = "draw"

[task_pool]
type = "generated"
task_type = "reverse"
difficulty = [3, 3]

[rubric]
correctness = 0.0

[[rewards]]
name = "low"
type = "function"
call = "low_ids:low"
weight = 1.0
"""
# It asks for low token ids, which any text has some of, and takes its time, so that groups come in another order than they began.
REWARD = """
import asyncio, random

async def low(completion_ids, **columns):
    await asyncio.sleep(random.random() / 4)
    return [sum(one < 100 for one in ids) / max(1, len(ids)) for ids in completion_ids]
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nmoe", *arguments]


def steps_taken(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def children(pid: int) -> list[int]:
    """The processes below one, engine servers' among them."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return [*found, *(below for child in found for below in children(child))]


def servers_of(pid: int) -> list[int]:
    return [one for one in children(pid) if b"nmoe.engine.server" in Path(f"/proc/{one}/cmdline").read_bytes()]


def disturbed(place: Path, faults: list[str], steps: int, chance: random.Random) -> None:
    """Runs the configuration in `place` to its end, with these faults on the way."""
    run, log = place / "run", (place / "output.txt").open("ab")

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command("rl", "train", "run.toml", *arguments), cwd=place, stdout=log, stderr=log)

    # Each fault waits for a step of its own.
    at = sorted(chance.sample(range(1, steps), len(faults)))
    training, deadline = start(), time.monotonic() + PATIENCE_S
    try:
        for fault, step in zip(faults, at, strict=True):
            while steps_taken(run) < step:
                if training.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{place}: ended before step {step}: {(place / 'output.txt').read_text()[-2000:]}")
                time.sleep(0.02)
            time.sleep(chance.random() / 2)
            if fault == "run":
                training.kill()
                training.wait()
                training = start("--run.resume=true" if (run / "config.toml").exists() else "--run.resume=auto")
            elif servers := servers_of(training.pid):
                os.kill(chance.choice(servers), signal.SIGKILL)
        if training.wait(max(0.0, deadline - time.monotonic())):
            raise SystemExit(f"{place}: failed: {(place / 'output.txt').read_text()[-2000:]}")
    finally:
        training.kill()


def versions(run: Path) -> int:
    """How many samples have tokens of several versions of the weights."""
    events = map(json.loads, (run / "journal.jsonl").read_bytes().splitlines())
    return sum(len(spans) > 1 for event in events for spans in event.get("spans", {}).values())


def made_and_replayed(number: int, seed: int) -> dict[str, Any]:
    """Makes a run, disturbs it, executes it again, and returns what differed."""
    chance = random.Random(f"{seed} {number}")
    staleness, faults = STALENESS[number % len(STALENESS)], [chance.choice(("server", "run")) for _ in range(3)]
    with tempfile.TemporaryDirectory(prefix="replayed_") as scratch:
        place = Path(scratch)
        (place / "run.toml").write_text(RUN.replace("STALENESS", str(staleness)))
        (place / "draw.toml").write_text(ENVIRONMENT)
        (place / "low_ids.py").write_text(REWARD)
        Tokenizer.train(["Reverse: analysis final back same"] * 10, 400).save(place / "tokenizer")
        disturbed(place, faults, STEPS, chance)
        replay = subprocess.run(
            command("replay", "run", "--train", "--allow-user-code"), cwd=place, capture_output=True, text=True
        )
        differing = [int(count.replace(",", "")) for count in re.findall(r": ([\d,]+) of [\d,]+ bytes", replay.stdout)]
        same = len(re.findall(r"^checkpoint of step \d+: the same$", replay.stdout, re.MULTILINE))
        if replay.returncode or same < STEPS // 2:
            print(replay.stdout[-2000:], replay.stderr[-2000:], sep="\n", flush=True)
        return {
            "staleness": staleness,
            "faults": faults,
            "samples_of_several_versions": versions(place / "run"),
            "checkpoints_the_same": same,
            "differing_bytes": sum(differing),
            "exit_code": replay.returncode,
        }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    results: list[dict[str, Any]] = []
    if asked.json is not None and asked.json.exists():
        kept = json.loads(asked.json.read_text())
        if kept["seed"] != asked.seed:
            raise SystemExit(f"{asked.json}: it has runs of seed {kept['seed']}; move it away")
        results = kept["runs"]
    for number in range(len(results), asked.runs):
        results.append(made_and_replayed(number, asked.seed))
        print(json.dumps(results[-1]), flush=True)
        if asked.json is not None:
            record = {"seed": asked.seed, "date": time.strftime("%Y-%m-%d"), **machine(), "runs": results}
            asked.json.write_text(json.dumps(record, indent=1) + "\n")
    failed = [
        one for one in results if one["exit_code"] or one["differing_bytes"] or one["checkpoints_the_same"] < STEPS // 2
    ]
    mixed = sum(one["samples_of_several_versions"] for one in results)
    print(f"{len(results)} runs, {len(failed)} of them differ; {mixed} samples of several versions of the weights")
    sys.exit(bool(failed) or not mixed)


if __name__ == "__main__":
    main()
