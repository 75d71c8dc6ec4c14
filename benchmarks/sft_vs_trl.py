"""Seconds per fine-tuning step, nmoe against TRL's SFTTrainer and a bare PyTorch loop: same weights, tokens, loss; fp32 on CPU.

A step is one cross-entropy over all sequences, one backward pass, clipping and one AdamW update. Run it with
benchmarks/sft_vs_trl.sh, which makes its environment.

Each side runs in a process of its own. First its loss and gradient norm are held against a hand-written reference. Then steps
alternate (nmoe, bare loop, TRL, and on odd steps the other way round) over the same tokens, so that whatever else the machine
does falls on all, and medians are compared. Every line states by how much nmoe's loss differs from those of the others at the
same step, after as many updates. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics

import bare_sft
import nmoe_sft
import torch
import trl_sft
from machine import machine, versions
from sft_workload import CASES, Case, Step, check, reference
from side import Side

PACKAGES = ("nmoe", "trl", "transformers", "accelerate", "torch")


def time_case(case: Case, warmup: int, steps: int) -> dict[str, object]:
    """Alternate steps of all sides from the same initial weights; medians over the steps after the warm-up."""
    expected = reference(case)
    with (
        Side(nmoe_sft.serve, case) as nmoe,
        Side(bare_sft.serve, case) as bare,
        Side(trl_sft.serve, case, warmup + steps) as trl,
    ):
        sides = {"nmoe": nmoe, "bare": bare, "trl": trl}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        differences = []
        for number in range(warmup + steps):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            taken: dict[str, Step] = {name: sides[name].ask(number) for name in order}
            if number == 0:
                for name, first in taken.items():
                    check(name, first, expected)
            differences.append(max(abs(taken["nmoe"].loss - step.loss) for step in taken.values()))
            print(
                f"{case.name} step {number}{' (warm-up)' if number < warmup else ''}: "
                + ", ".join(f"{name} {taken[name].seconds:.4f} s" for name in sides)
                + f"; loss {taken['nmoe'].loss:.6f}, from the others' by {differences[-1]:.1e}",
                flush=True,
            )
            if number >= warmup:
                for name, step in taken.items():
                    seconds[name].append(step.seconds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result: dict[str, object] = {
        "name": case.name,
        **{f"{name}_s": round(median, 5) for name, median in medians.items()},
        "ratio_bare": round(medians["bare"] / medians["nmoe"], 3),
        "ratio_trl": round(medians["trl"] / medians["nmoe"], 3),
        **{
            f"{name}_quartiles_s": [round(q, 5) for q in statistics.quantiles(values)]
            for name, values in seconds.items()
        },
        "nmoe_tokens_per_second": round(case.predicted / medians["nmoe"]),
        "loss_difference_max": max(differences),
        "steps": steps,
    }
    print(
        f"{case.name}: nmoe {result['nmoe_s']} s per step: {result['ratio_bare']} times as fast as the bare loop, "
        f"{result['ratio_trl']} times as fast as trl (losses differ by at most {max(differences):.1e})",
        flush=True,
    )
    return result


def main() -> None:
    """Parity and timing of every case, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each side per case, at least 2")
    parser.add_argument("--warmup", type=int, default=4, help="steps of each side before timing starts, at least 1")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.warmup < 1:
        parser.error("--steps must be at least 2 (quartiles need two values) and --warmup at least 1")
    about = {"machine": machine(), "versions": versions(*PACKAGES)}
    print(f"{about['machine']}, all sides with {torch.get_num_threads()} threads; {about['versions']}", flush=True)
    print(json.dumps({"cases": [time_case(case, arguments.warmup, arguments.steps) for case in CASES], **about}))


if __name__ == "__main__":
    main()
