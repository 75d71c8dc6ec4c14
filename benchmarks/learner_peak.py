"""How near the learner comes to the machine's peak of matrix products, at the shape of a small released model.

    python benchmarks/learner_peak.py --out benchmarks/results/learner_peak.json

The update is that of `grpo_vs_trl.py --workload smollm2_135m`: 16 prompts of 64 tokens with 8 completions of 64 tokens each,
which pass in four equal micro-batches, then clipping and AdamW. One micro-batch and one step are timed; an update is four of one
and one of the other. Completions are random ids, so that nothing is sampled. In turns with them run

- the products that a micro-batch cannot do without, alone, by the operations that the learner calls: every linear layer's, forward
  and twice backward, and the head's three, 512 rows at a time;
- the peak: square products of some sizes, of which the fastest counts.

A product of N x D by D x F counts 2 N D F operations; attention, and the head's logits that its kernel computes a second time,
count none. Figures are medians of CPU seconds, which other work on the machine disturbs less than the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from grpo_workload import DTYPES, WORKLOADS, Dtype
from head import products
from machine import machine, versions
from nmoe_grpo import NmoeGrpo
from result_files import write_results
from torch import Tensor

from nmoe.learner.batch import Batch
from nmoe.model.layers import Linear
from nmoe.model.ops.table import ops_for
from nmoe.types import Sample

WORKLOAD = "smollm2_135m"
MICRO_BATCHES = 4  # of the update
PEAK_SIZES = (768, 1024, 1536, 2048)
HEAD_ROWS = 512


def micro_batch(side: NmoeGrpo, prompts: int, new_tokens: int) -> Batch:
    """A batch of the first prompts with random completions and advantages."""
    generator, (rows, vocabulary) = (
        torch.Generator().manual_seed(0),
        (prompts * 8, side.learner.model.config.vocab_size),
    )
    ids = torch.randint(2, vocabulary, (rows, new_tokens), generator=generator).tolist()
    samples = [Sample(row, [-10.8] * new_tokens, [0] * new_tokens, "length") for row in ids]
    return side._batch(samples, torch.randn(rows, generator=generator))


def layer_products(weight_FD: Tensor, rows: int) -> Callable[[], object]:
    """A linear layer's product and those of its two gradients."""
    outputs, inputs = weight_FD.shape
    x_ND, grad_NF = torch.randn(rows, inputs).to(weight_FD.dtype), torch.randn(rows, outputs).to(weight_FD.dtype)
    ops = ops_for(x_ND)

    @torch.no_grad()
    def run() -> None:
        ops.product(x_ND, weight_FD)
        ops.input_gradient(grad_NF, weight_FD)
        ops.weight_gradient(x_ND, grad_NF)

    return run


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(dtype: Dtype, rounds: int) -> dict[str, object]:
    """Medians of all parts over the rounds, which follow one that warms up."""
    workload = WORKLOADS[WORKLOAD]
    prompts = workload.prompts // MICRO_BATCHES
    side = NmoeGrpo(replace(workload, prompts=prompts), dtype)
    batch = micro_batch(side, prompts, workload.max_new_tokens)
    shared = batch.shared_rows()
    assert shared is not None, "completions of a prompt share it"
    rows, scored = len(shared[0]), int(batch.scored_T.sum())

    model, head = side.learner.model, side.learner.model.head_weight.detach()
    shapes = [module.weight.shape for block in model.blocks for module in block.modules() if isinstance(module, Linear)]
    layers = {shape: layer_products(torch.randn(shape).to(head.dtype) / 24, rows) for shape in dict.fromkeys(shapes)}
    states = torch.randn(HEAD_ROWS, head.shape[1]).to(head.dtype)
    squares = {size: torch.randn(size, size).to(head.dtype) for size in PEAK_SIZES}
    operations = 6.0 * (rows * sum(shape.numel() for shape in shapes) + scored * head.numel())

    work: dict[str, Callable[[], object]] = {
        "pass_s": lambda: side.learner.forward_backward(batch, side.objective).result(),
        "step_s": lambda: side.learner.optim_step().result(),
        "head": lambda: products(states, head, "training"),
        **{str(tuple(shape)): run for shape, run in layers.items()},
        **{str(size): lambda x=x: ops_for(x).product(x, x) for size, x in squares.items()},
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, run in work.items():
            with torch.no_grad() if name in map(str, PEAK_SIZES) else torch.enable_grad():
                seconds = cpu_seconds(run)
            if number > 0:
                taken[name].append(seconds)
    found = {name: statistics.median(each) for name, each in taken.items()}

    in_layers = sum(found[str(tuple(shape))] for shape in shapes)
    in_head = found["head"] * scored / HEAD_ROWS
    peak = max(2.0 * size**3 / found[str(size)] for size in PEAK_SIZES)
    update = MICRO_BATCHES * found["pass_s"] + found["step_s"]
    return {
        "dtype": dtype,
        "rows": rows,
        "scored": scored,
        "pass_s": round(found["pass_s"], 3),
        "step_s": round(found["step_s"], 3),
        "update_s": round(update, 2),
        "products_of_layers_s": round(in_layers, 3),
        "products_of_head_s": round(in_head, 3),
        "products_share_of_pass": round((in_layers + in_head) / found["pass_s"], 3),
        "operations_of_pass": operations,
        "peak_gflops": round(peak / 1e9, 1),
        "products_gflops": round(operations / (in_layers + in_head) / 1e9, 1),
        "update_gflops": round(MICRO_BATCHES * operations / update / 1e9, 1),
        "products_share_of_peak": round(operations / (in_layers + in_head) / peak, 3),
        "update_share_of_peak": round(MICRO_BATCHES * operations / update / peak, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to write the results, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load_before = os.getloadavg()
    results = []
    for dtype in arguments.dtypes:
        results.append(measure(dtype, arguments.rounds))
        print(json.dumps(results[-1]), flush=True)
    if arguments.out is not None:
        about = {"workload": WORKLOAD, "rounds": arguments.rounds, "machine": machine(), "versions": versions("torch")}
        load = {"load_before": load_before, "load_after": os.getloadavg()}
        write_results(arguments.out, {**about, **load, "results": results})


if __name__ == "__main__":
    main()
