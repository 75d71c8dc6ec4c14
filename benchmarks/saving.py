"""Times saving checkpoints while a model trains: waited for, and by a thread (`nmoe.runs.checkpoint`).

    python benchmarks/saving.py
    python benchmarks/saving.py --device cuda

Models of the speedrun's shape and of 0.1 billion parameters, in fp32 on a CPU and bf16 on a GPU, train on random tokens and save
after every step, the worst case for the thread. Each side runs in a process of its own, in turns. Prints the seconds that
training stands still for a save, those of a step and its save to the end, and the peak of the host's memory, as medians over
rounds; the bytes of a checkpoint beside them.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch
from decode_workload import SHAPES
from machine import machine
from on_device import add_device, random_model, wall_clock

from nmoe.config.packaged import CONFIGS
from nmoe.config.tables.model import OptimizerSection
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.config import ModelConfig
from nmoe.model.families.qwen3 import config_from_hf
from nmoe.recipes.setup import keep_freed_memory
from nmoe.runs.checkpoint import Saver

SIDES = {"waited for": False, "by a thread": True}


def shape(name: str) -> ModelConfig:
    if name == "speedrun":
        return ModelConfig(
            vocab_size=710, **tomllib.loads((CONFIGS / "speedrun_base.toml").read_text())["model"]["shape"]
        )
    return config_from_hf(SHAPES["qwen3_0p1b"])


def side(name: str, asynchronous: bool, steps: int, device: torch.device) -> dict[str, float]:
    """One process: `steps` steps with a save after each, after one of both to warm up."""
    keep_freed_memory()
    torch.manual_seed(0)
    learner = Learner(random_model(shape(name), device), OptimizerSection(), 10**6, 16384)
    tokens, sequences = 512, 4
    ids = torch.randint(700, (2, tokens * sequences))
    scored = torch.ones(tokens * sequences, dtype=torch.bool)
    batch = Batch((tokens,) * sequences, ids[0], ids[1], scored, torch.full(scored.shape, 1 / len(scored)))
    stood: list[float] = []
    with tempfile.TemporaryDirectory() as directory, Saver(Path(directory), 2, asynchronous) as saver:
        for step in range(steps + 1):
            if step == 1:
                saver.wait()
                began = wall_clock(device)
            learner.forward_backward(batch, cross_entropy).result()
            learner.optim_step().result()
            saving = wall_clock(device)
            saver.save(step, {"learner": learner})
            stood.append(wall_clock(device) - saving)
        saver.wait()
        whole = wall_clock(device) - began
        size = sum(path.stat().st_size for path in (Path(directory) / "latest").iterdir())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "stands_s": statistics.median(stood[1:]),
        "step_and_save_s": whole / steps,
        "peak_bytes": peak,
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", default=["speedrun", "0p1b"], choices=["speedrun", "0p1b"])
    parser.add_argument("--steps", type=int, default=8, help="in each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--here", nargs=2, metavar=("MODEL", "SIDE"), help="only this, in this process")
    add_device(parser)
    arguments = parser.parse_args()
    if arguments.here:
        name, which = arguments.here
        print(json.dumps(side(name, SIDES[which], arguments.steps, arguments.device)))
        return
    print(json.dumps(machine()))
    for name in arguments.models:
        found: dict[str, list[dict[str, Any]]] = {which: [] for which in SIDES}
        for _ in range(arguments.rounds):
            for which in SIDES:
                command = [sys.executable, __file__, "--steps", str(arguments.steps)]
                command += ["--device", str(arguments.device), "--here", name, which]
                found[which].append(json.loads(subprocess.check_output(command)))
        for which, rounds in found.items():
            medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            print(
                f"{name}, {which}: training stands {1e3 * medians['stands_s']:.1f} ms, a step and its save take "
                f"{1e3 * medians['step_and_save_s']:.0f} ms, peak {medians['peak_bytes'] / 2**20:,.0f} MiB; a checkpoint has "
                f"{medians['bytes'] / 2**20:,.1f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
