"""Seconds per GRPO step, nmoe against TRL's GRPOTrainer: same weights, prompts, completion lengths, loss; fp32 on CPU.

A step is 64 completions generated (8 prompts of 16 tokens, 8 completions each), graded and turned into advantages, one
loss, one backward pass and one AdamW update. Run it with benchmarks/grpo_vs_trl.sh, which makes its environment.

First both sides are held against a hand-written loss on one and the same batch. Then steps alternate (nmoe, TRL, nmoe,
TRL ...), so that whatever else the machine does falls on both, and medians are compared. Every line states the mismatch
of the nmoe step it timed: the difference between the logprobs that sampling emitted and those that the learner
recomputed. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from importlib.metadata import version
from pathlib import Path

import torch
from grpo_parity import check_batch, check_gradients, check_loss, clipped, reference_gradients, total_norm
from grpo_workload import CASES, Case
from nmoe_grpo import NmoeGrpo
from trl_grpo import TrlGrpo

PACKAGES = ("nmoe", "trl", "transformers", "accelerate", "torch")


def prove_parity(case: Case) -> None:
    """One TRL step from the initial weights; its batch again through the reference and through nmoe."""
    lengths = case.lengths(0)
    trl = TrlGrpo()
    trl.clock.keep_gradients = True
    trl.step(lengths)
    batch = trl.last_batch()
    check_batch("trl", batch, lengths)
    loss, gradients = reference_gradients(batch)
    norm = total_norm(gradients)
    check_loss("trl", (trl.clock.loss, trl.clock.gradient_norm), (loss, norm))
    check_gradients("trl", trl.clock.gradients, clipped(gradients))
    check_loss("nmoe", NmoeGrpo().loss_and_gradient_norm(batch), (loss, norm))


def time_case(case: Case, warmup: int, steps: int) -> dict[str, object]:
    """Alternate steps of both sides from the same initial weights; medians over the steps after the warm-up."""
    nmoe, trl = NmoeGrpo(), TrlGrpo()
    nmoe_s, trl_s, trl_generation_s, mean_mismatches, max_mismatches = [], [], [], [], []
    for step in range(warmup + steps):
        lengths = case.lengths(step)
        nmoe_seconds = nmoe.step(lengths)
        trl_seconds = trl.step(lengths)
        check_batch("nmoe", nmoe.last_batch(), lengths)
        check_batch("trl", trl.last_batch(), lengths)
        mismatch_mean, mismatch_max = nmoe.mismatch()
        print(
            f"{case.name} step {step}{' (warm-up)' if step < warmup else ''}: "
            f"nmoe {nmoe_seconds:.3f} s (mismatch mean {mismatch_mean:.1e}, max {mismatch_max:.1e}), "
            f"trl {trl_seconds:.3f} s (generation {trl.generation_seconds:.3f} s)",
            flush=True,
        )
        if step < warmup:
            continue
        nmoe_s.append(nmoe_seconds)
        trl_s.append(trl_seconds)
        trl_generation_s.append(trl.generation_seconds)
        mean_mismatches.append(mismatch_mean)
        max_mismatches.append(mismatch_max)
    result: dict[str, object] = {
        "name": case.name,
        "nmoe_s": round(statistics.median(nmoe_s), 4),
        "trl_s": round(statistics.median(trl_s), 4),
        "ratio": round(statistics.median(trl_s) / statistics.median(nmoe_s), 3),
        "nmoe_quartiles_s": [round(q, 4) for q in statistics.quantiles(nmoe_s)],
        "trl_quartiles_s": [round(q, 4) for q in statistics.quantiles(trl_s)],
        "trl_generation_s": round(statistics.median(trl_generation_s), 4),
        "mismatch_abs_mean": statistics.fmean(mean_mismatches),
        "mismatch_abs_max": max(max_mismatches),
        "steps": steps,
    }
    print(
        f"{case.name}: nmoe {result['nmoe_s']} s, trl {result['trl_s']} s per step: {result['ratio']} times as fast "
        f"(mismatch mean {result['mismatch_abs_mean']:.1e}, max {result['mismatch_abs_max']:.1e})",
        flush=True,
    )
    return result


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.platform()}


def main() -> None:
    """Parity, then timing of every case, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each side per case, at least 2")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side before timing starts")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.warmup < 0:
        parser.error("--steps must be at least 2 (quartiles need two values) and --warmup at least 0")
    about = {"machine": machine(), "versions": {name: version(name) for name in PACKAGES}}
    print(f"{about['machine']}, both sides with {torch.get_num_threads()} threads; {about['versions']}", flush=True)
    for case in CASES:
        print(f"parity on one batch of {case.name}:", flush=True)
        prove_parity(case)
    print(json.dumps({"cases": [time_case(case, arguments.warmup, arguments.steps) for case in CASES], **about}))


if __name__ == "__main__":
    main()
