"""Asynchronous runs against synchronous ones: speed where tools sleep, cost where they do not, and held-out results.

    python benchmarks/asynchrony.py                    speed and cost in full: a quarter of an hour on a quiet machine
    python benchmarks/asynchrony.py --quick            the same with few and small steps
    python benchmarks/asynchrony.py --kind async       one of synchronous, async, single, async_awake, for the full sizes
    python benchmarks/asynchrony.py --held-out runs/speedrun/base [--seeds 0 1 2] [--staleness 0 1 4 8] [--steps 50]

Speed: a model calls a tool twice before it answers, so that a sample has three turns; 32 x 8 samples a step. A call sleeps for a
lognormal time (median 0.3 s, sigma 1, at most 5 s, drawn from a seed). The idle share I of the synchronous run is the share of its
steps in which neither learner nor engine used a core: 1 - CPU seconds / seconds, with one thread each. The asynchronous run with
K = 4 has to train at least 0.8 / (1 - I) times as many samples a second. Without sleeps it may take 1.2 times the CPU seconds per
trained sample of one process.

Held out: `sort_grpo` over two engine servers, each K against K = 0 of the same seed, on the run's held-out problems. The lower
bound of the paired 95% interval has to lie above -5 points, and each run 30 points above its base. A record that is there is not
measured again, so that the command can be ended at any time. Results are in benchmarks/results/asynchrony.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine
from result_files import write_results

import nmoe
from nmoe.envs.tools.tool import Tool
from nmoe.rl.train import PolicyGradient
from nmoe.runs.ledger import read_metrics
from nmoe.statistics import paired_difference

RESULTS = Path(__file__).parent / "results" / "asynchrony.json"
KINDS = ("synchronous", "async", "single", "async_awake")
STALENESS = 4
# The first steps fill caches and, beside the trainer, the groups under way; in the last ones fewer are under way.
SKIPPED, LEFT_OUT = 2, STALENESS
MEDIAN_S, SIGMA, MOST_S = 0.3, 1.0, 5.0
WEIGHTS = {"red": 31, "blue": 74, "green": 52, "white": 86, "black": 19, "grey": 63}
QUESTION = "How much do the {} and the {} box weigh together?"
_sleeps, _awake = random.Random(0), False


async def weigh(box: str) -> int:
    """Weighs a box."""
    if not _awake:
        await asyncio.sleep(min(MEDIAN_S * math.exp(SIGMA * _sleeps.gauss(0, 1)), MOST_S))
    return WEIGHTS[box]


class Boxes(nmoe.Task):
    def generate(self, rng: random.Random, difficulty: int) -> dict[str, str]:
        first, second = rng.sample(list(WEIGHTS), 2)
        return {"first": first, "second": second}

    def prompt(self, record: dict[str, str]) -> str:
        return QUESTION.format(record["first"], record["second"])

    def grade(self, record: dict[str, str], answer: str) -> bool:
        return answer == str(WEIGHTS[record["first"]] + WEIGHTS[record["second"]])


def conversations() -> list[dict[str, Any]]:
    tools = [Tool(weigh).definition.as_function()]
    found = []
    for first in WEIGHTS:
        for second in WEIGHTS:
            if first != second:
                messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION.format(first, second)}]
                for number, box in enumerate((first, second)):
                    function = {"name": "weigh", "arguments": {"box": box}}
                    call = {"id": str(number), "type": "function", "function": function}
                    messages += [
                        {"role": "assistant", "content": "", "tool_calls": [call]},
                        {"role": "tool", "tool_call_id": str(number), "content": str(WEIGHTS[box])},
                    ]
                answer = str(WEIGHTS[first] + WEIGHTS[second])
                found.append({"messages": [*messages, {"role": "assistant", "content": answer}], "tools": tools})
    return found


def base_of(directory: Path, epochs: int) -> Path:
    """Returns a checkpoint that calls the tool twice and then answers; trains it first if it is not there."""
    if not (directory / "base" / "checkpoints").exists():
        words = [str(Tool(weigh).definition), *(QUESTION.format(one, one) for one in WEIGHTS)]
        nmoe.Tokenizer.train(words * 9, 384).save(directory)
        nmoe.train_sft(
            {"hidden_size": 64, "layers": 2, "heads": 4, "context_tokens": 320},
            data=conversations(),
            config={
                "run.name": "base",
                "run.directory": str(directory),
                "run.threads": 1,
                "model.tokenizer": str(directory),
                "records.epochs": epochs,
                "records.tokens_per_step": 4096,
                "optimizer.learning_rate": 5e-3,
            },
        )
    return directory / "base"


def cpu_s() -> float:
    """Returns the CPU seconds of this process and of all below it that live."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    mine, found = [os.getpid()], 0.0
    while mine:
        one = mine.pop()
        found += used.get(one, 0.0)
        mine += [child for child, parent in parents.items() if parent == one]
    return found


def measured(kind: str, base: Path, directory: Path, steps: int, prompts: int) -> dict[str, Any]:
    """Trains a run of this kind, and returns its figures, without those of the first and last steps."""
    global _awake
    _awake = kind in ("single", "async_awake")
    config: dict[str, Any] = {
        "run.name": kind,
        "run.directory": str(directory),
        "run.steps": steps,
        "run.threads": 1,
        "sampling.max_new_tokens": 96,
        "batch.prompts_per_step": prompts,
        "batch.group_size": 8,
        "batch.max_refills": 0,
        # No group is dropped, so that each step trains on as many samples.
        "algorithm.advantage": "reinforce_pp",
        "optimizer.learning_rate": 1e-5,
        "checkpoint.every_steps": steps,
        "eval": [],
    }
    if kind != "single":
        config |= {"engine.kind": "server"}
    if kind.startswith("async"):
        config |= {"async.max_staleness": STALENESS}
    marks = []
    step = PolicyGradient.step

    def marked(self: PolicyGradient, number: int) -> Any:
        if number == SKIPPED + 1:
            marks.append((time.perf_counter(), cpu_s()))
        done = step(self, number)
        if number == steps - LEFT_OUT:
            marks.append((time.perf_counter(), cpu_s()))
        return done

    PolicyGradient.step = marked  # type: ignore[method-assign]
    run = nmoe.train_rl(base, env=Boxes, tools=[weigh], config=config)
    (began, cpu_before), (ended, cpu_after) = marks
    rows = run.metrics[SKIPPED:-LEFT_OUT]
    samples, wall, cpu = len(rows) * prompts * 8, ended - began, cpu_after - cpu_before
    return {
        "kind": kind,
        "steps": steps,
        "samples_per_step": prompts * 8,
        "samples_per_second": samples / wall,
        "cpu_s_per_sample": cpu / samples,
        "idle_share": 1 - cpu / wall,
        "turns_mean": sum(row["turns_mean"] for row in rows) / len(rows),
        "staleness_mean": sum(row.get("staleness_mean", 0.0) for row in rows) / len(rows),
        "trainer_wait_s": sum(row.get("trainer_wait_s", row["time_rollout_s"]) for row in rows) / len(rows),
    }


def verdicts(speed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns what the requirements compare, as far as it was measured."""
    found: dict[str, Any] = {}
    if {"synchronous", "async"} <= speed.keys():
        idle = speed["synchronous"]["idle_share"]
        times = speed["async"]["samples_per_second"] / speed["synchronous"]["samples_per_second"]
        found |= {"times_synchronous": times, "wanted": 0.8 / (1 - idle), "fast_enough": times >= 0.8 / (1 - idle)}
    if {"single", "async_awake"} <= speed.keys():
        cost = speed["async_awake"]["cpu_s_per_sample"] / speed["single"]["cpu_s_per_sample"]
        found |= {"times_cpu_of_one_process": cost, "cheap_enough": cost <= 1.2}
    return found


def held_out(base: Path, directory: Path, seed: int, staleness: int, steps: int) -> dict[str, Any]:
    """Trains `sort_grpo` over two servers, and returns the shares of right answers of its base and of its end, by problem."""
    name = f"seed_{seed}_k_{staleness}_steps_{steps}"
    command = [sys.executable, "-m", "nmoe", "rl", "train", "sort_grpo", f"--model.path={base.absolute()}"]
    settings = [f"--run.directory={directory}", f"--run.name={name}", f"--run.seed={seed}", f"--run.steps={steps}"]
    servers = ["--engine.kind=server", "--engine.servers=2", f"--async.max_staleness={staleness}"]
    done = subprocess.run([*command, *settings, *servers], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rows = read_metrics(directory / name)
    first, last = (
        json.loads((directory / name / "eval" / f"step_{step:06}.json").read_text())["results"][0]["outcomes"]
        for step in (0, rows[-1]["step"])
    )
    return {
        "seed": seed,
        "staleness": staleness,
        "steps": len(rows),
        "base": sum(first.values()) / len(first),
        "end": sum(last.values()) / len(last),
        "staleness_mean": sum(row.get("staleness_mean", 0.0) for row in rows) / len(rows),
        "outcomes": last,
    }


def paired(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns each asynchronous run against the synchronous one of its seed and number of steps."""
    synchronous = {(one["seed"], one["steps"]): one["outcomes"] for one in records if one["staleness"] == 0}
    found = []
    for one in records:
        if one["staleness"] and (one["seed"], one["steps"]) in synchronous:
            before = synchronous[one["seed"], one["steps"]]
            keys = sorted(before.keys() & one["outcomes"].keys())
            gain = paired_difference([before[key] for key in keys], [one["outcomes"][key] for key in keys])
            interval = [gain.interval.low, gain.interval.high]
            passes = gain.interval.low > -0.05 and one["end"] >= one["base"] + 0.3
            found.append(
                {"seed": one["seed"], "staleness": one["staleness"], "steps": one["steps"], "problems": len(keys)}
                | {"difference": gain.value}
                | {"interval": interval, "passes": passes}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="few and small steps; writes no results")
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS, help="what to measure")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--held-out", type=Path, metavar="BASE", help="the speedrun's base, to train with each staleness"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 8])
    parser.add_argument("--steps", type=int, default=50, help="of each run; the synchronous one has learned most by 50")
    parser.add_argument("--directory", type=Path, default=Path("runs/asynchrony"))
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    steps, prompts, epochs = (10, 8, 30) if arguments.quick else (20, 32, 120)
    if arguments.one:
        base = base_of(directory, epochs)
        with tempfile.TemporaryDirectory(dir=directory) as place:
            print(json.dumps(measured(arguments.one, base, Path(place), steps, prompts)))
        return
    result: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() and not arguments.quick else {}
    result |= {"benchmark": "asynchrony", "date": time.strftime("%Y-%m-%d"), **machine()}
    if arguments.held_out is not None:
        records = {(one["seed"], one["staleness"], one["steps"]): one for one in result.get("held_out", [])}
        for seed, staleness in itertools.product(arguments.seeds, arguments.staleness):
            key = seed, staleness, arguments.steps
            if key not in records:
                records[key] = held_out(arguments.held_out, directory, *key)
                result |= {"held_out": [*records.values()], "paired": paired([*records.values()])}
                write_results(RESULTS, result)
                print({name: value for name, value in records[key].items() if name != "outcomes"}, flush=True)
        print(*result.get("paired", []), sep="\n")
        return
    speed = {one["kind"]: one for one in result.get("speed", [])}
    for kind in arguments.kind:
        command = [
            sys.executable,
            __file__,
            "--one",
            kind,
            "--directory",
            str(directory),
            *["--quick"][: arguments.quick],
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        speed[kind] = json.loads(done.stdout.strip().splitlines()[-1])
        print(speed[kind], flush=True)
        result |= {"speed": [*speed.values()], "verdict": verdicts(speed)}
        if not arguments.quick:
            write_results(RESULTS, result)
    print(result["verdict"])


if __name__ == "__main__":
    main()
