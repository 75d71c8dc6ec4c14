"""Seconds per GRPO step, nmoe against TRL's GRPOTrainer: same weights, prompts, completion lengths, loss; fp32 on CPU.

A step is 64 completions generated (8 prompts of 16 tokens, 8 completions each), graded and turned into advantages, one
loss, one backward pass and one AdamW update. Run it with benchmarks/grpo_vs_trl.sh, which makes its environment.

First both sides are held against a hand-written loss on one and the same batch. Then each runs in a process of its own, and
steps alternate (nmoe, TRL, nmoe, TRL ...), so that whatever else the machine does falls on both, and medians are compared.
Every line states the mismatch of the nmoe step it timed: the difference between the logprobs that sampling emitted and those
that the learner recomputed. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics

import nmoe_grpo
import torch
import trl_grpo
from grpo_parity import check_batch, check_gradients, check_loss, clipped, reference_gradients, total_norm
from grpo_workload import CASES, Case
from machine import machine, versions
from nmoe_grpo import NmoeGrpo, NmoeStep
from side import Side
from trl_grpo import TrlGrpo, TrlStep

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
    nmoe_s, trl_s, trl_generation_s, mean_mismatches, max_mismatches = [], [], [], [], []
    with Side(nmoe_grpo.serve) as nmoe, Side(trl_grpo.serve) as trl:
        for number in range(warmup + steps):
            lengths = case.lengths(number)
            ours: NmoeStep = nmoe.ask(lengths)
            theirs: TrlStep = trl.ask(lengths)
            check_batch("nmoe", ours.batch, lengths)
            check_batch("trl", theirs.batch, lengths)
            print(
                f"{case.name} step {number}{' (warm-up)' if number < warmup else ''}: "
                f"nmoe {ours.seconds:.3f} s (mismatch mean {ours.mismatch_mean:.1e}, max {ours.mismatch_max:.1e}), "
                f"trl {theirs.seconds:.3f} s (generation {theirs.generation_seconds:.3f} s)",
                flush=True,
            )
            if number < warmup:
                continue
            nmoe_s.append(ours.seconds)
            trl_s.append(theirs.seconds)
            trl_generation_s.append(theirs.generation_seconds)
            mean_mismatches.append(ours.mismatch_mean)
            max_mismatches.append(ours.mismatch_max)
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


def main() -> None:
    """Parity, then timing of every case, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each side per case, at least 2")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side before timing starts")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.warmup < 0:
        parser.error("--steps must be at least 2 (quartiles need two values) and --warmup at least 0")
    about = {"machine": machine(), "versions": versions(*PACKAGES)}
    print(f"{about['machine']}, both sides with {torch.get_num_threads()} threads; {about['versions']}", flush=True)
    for case in CASES:
        print(f"parity on one batch of {case.name}:", flush=True)
        prove_parity(case)
    print(json.dumps({"cases": [time_case(case, arguments.warmup, arguments.steps) for case in CASES], **about}))


if __name__ == "__main__":
    main()
