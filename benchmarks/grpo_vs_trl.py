"""Seconds per GRPO step, nmoe against TRL's GRPOTrainer: same weights, prompts, completion lengths, loss, dtype; on a CPU.

A step is all completions generated (8 to each prompt), graded and turned into advantages, one loss, its gradient and one AdamW
update. Run it with benchmarks/grpo_vs_trl.sh, which makes its environment:

    benchmarks/grpo_vs_trl.sh                                          the tiny model, 64 completions of up to 32 tokens
    benchmarks/grpo_vs_trl.sh --workload smollm2_135m --dtypes bf16    a released model's shape, 128 completions of 64 tokens

First both sides are held in fp32 against a hand-written loss on one and the same batch. Then each runs in a process of its own, and
steps alternate (nmoe, TRL, nmoe, TRL ...), so that other work on the machine falls on both. Medians are compared, by the clock and
in CPU seconds.
Every line states the mismatch of the nmoe step it timed: the difference between the logprobs that sampling emitted and those
that the learner recomputed. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable

import nmoe_grpo
import torch
import trl_grpo
from grpo_workload import (
    DTYPES,
    WORKLOADS,
    Case,
    Dtype,
    Workload,
    check_batch,
    check_gradients,
    check_loss,
    clipped,
    reference_gradients,
    total_norm,
)
from machine import machine, versions
from nmoe_grpo import NmoeGrpo, NmoeStep
from side import Side
from trl_grpo import TrlGrpo, TrlStep

PACKAGES = ("nmoe", "trl", "transformers", "accelerate", "torch")


def in_own_process(function: Callable[..., None], *arguments: object) -> None:
    """Runs it, and ends with it where it fails. The memory it used is free afterwards: nmoe's side keeps what it frees."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def prove_parity(workload: Workload, case: Case) -> None:
    """One TRL step from the initial weights; its batch again through the reference and through nmoe."""
    lengths = case.lengths(0, workload.rows)
    trl = TrlGrpo(workload)
    trl.clock.keep_gradients = True
    trl.step(lengths)
    batch = trl.last_batch()
    check_batch("trl", batch, lengths)
    loss, gradients = reference_gradients(workload, batch)
    norm = total_norm(gradients)
    check_loss("trl", (trl.clock.loss, trl.clock.gradient_norm), (loss, norm))
    check_gradients("trl", trl.clock.gradients, clipped(gradients))
    check_loss("nmoe", NmoeGrpo(workload).loss_and_gradient_norm(batch), (loss, norm))


def time_case(workload: Workload, dtype: Dtype, case: Case, warmup: int, steps: int) -> dict[str, object]:
    """Alternate steps of both sides from the same initial weights; medians over the steps after the warm-up."""
    name = f"{case.name} {dtype}"
    ours: list[NmoeStep] = []
    theirs: list[TrlStep] = []
    with Side(nmoe_grpo.serve, workload, dtype) as nmoe, Side(trl_grpo.serve, workload, dtype) as trl:
        for number in range(warmup + steps):
            lengths = case.lengths(number, workload.rows)
            mine: NmoeStep = nmoe.ask(lengths)
            other: TrlStep = trl.ask(lengths)
            check_batch("nmoe", mine.batch, lengths)
            check_batch("trl", other.batch, lengths)
            print(
                f"{name} step {number}{' (warm-up)' if number < warmup else ''}: "
                f"nmoe {mine.seconds:.3f} s (mismatch mean {mine.mismatch_mean:.1e}, max {mine.mismatch_max:.1e}), "
                f"trl {other.seconds:.3f} s (generation {other.generation_seconds:.3f} s); CPU seconds {mine.cpu_seconds:.3f} "
                f"(sampling {mine.sampling_cpu_seconds:.3f}) and {other.cpu_seconds:.3f} "
                f"(generation {other.generation_cpu_seconds:.3f})",
                flush=True,
            )
            if number >= warmup:
                ours.append(mine)
                theirs.append(other)

    def median(name: str, side: list[NmoeStep] | list[TrlStep]) -> float:
        return statistics.median(getattr(step, name) for step in side)

    result: dict[str, object] = {
        "name": name,
        "nmoe_s": round(median("seconds", ours), 4),
        "trl_s": round(median("seconds", theirs), 4),
        "ratio": round(median("seconds", theirs) / median("seconds", ours), 3),
        "nmoe_cpu_s": round(median("cpu_seconds", ours), 4),
        "trl_cpu_s": round(median("cpu_seconds", theirs), 4),
        "ratio_cpu": round(median("cpu_seconds", theirs) / median("cpu_seconds", ours), 3),
        "nmoe_sampling_cpu_s": round(median("sampling_cpu_seconds", ours), 4),
        "trl_generation_s": round(median("generation_seconds", theirs), 4),
        "trl_generation_cpu_s": round(median("generation_cpu_seconds", theirs), 4),
        "mismatch_abs_mean": statistics.fmean(step.mismatch_mean for step in ours),
        "mismatch_abs_max": max(step.mismatch_max for step in ours),
        "steps": steps,
    }
    if steps > 1:
        for side, taken in (("nmoe", ours), ("trl", theirs)):
            result[f"{side}_quartiles_s"] = [round(q, 4) for q in statistics.quantiles(step.seconds for step in taken)]
    print(
        f"{name}: nmoe {result['nmoe_s']} s, trl {result['trl_s']} s per step: {result['ratio']} times as fast, by CPU seconds "
        f"{result['ratio_cpu']} (mismatch mean {result['mismatch_abs_mean']:.1e}, max {result['mismatch_abs_max']:.1e})",
        flush=True,
    )
    return result


def main() -> None:
    """Parity, then timing of every case, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="qwen3_moe_tiny")
    parser.add_argument("--dtypes", default="fp32", metavar="A,B", help=f"of {','.join(DTYPES)} (default fp32)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each side per case")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side before timing starts")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.warmup < 0:
        parser.error("--steps must be at least 1 and --warmup at least 0")
    dtypes = [dtype for dtype in DTYPES if dtype in arguments.dtypes.split(",")]
    if len(dtypes) < len(arguments.dtypes.split(",")):
        parser.error(f"--dtypes {arguments.dtypes}: of {','.join(DTYPES)}")
    workload = WORKLOADS[arguments.workload]
    about = {"workload": arguments.workload, "machine": machine(), "versions": versions(*PACKAGES)}
    print(f"{about['machine']}, both sides with {torch.get_num_threads()} threads; {about['versions']}", flush=True)
    if "fp32" in dtypes:
        for case in workload.cases:
            print(f"parity on one batch of {case.name}:", flush=True)
            in_own_process(prove_parity, workload.for_parity(), case)
    cases = [
        time_case(workload, dtype, case, arguments.warmup, arguments.steps)
        for dtype in dtypes
        for case in workload.cases
    ]
    print(json.dumps({"cases": cases, **about}))


if __name__ == "__main__":
    main()
