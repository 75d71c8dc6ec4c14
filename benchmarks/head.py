"""Times log-probabilities and entropies at the vocabulary of a released model against the plain product.

    python benchmarks/head.py                     # V = 151,936, as Qwen3's models have it, and D = 256 and 1024
    python benchmarks/head.py --device cuda       # on a GPU, in seconds of the clock

Three ways of use: training (gradients of states and head), a frozen head (adapters: of the states alone), and no gradient. Each is
held against the matrix products that it cannot do without, over all rows at once: one, two or three, once as nmoe computes them
(`products`: oneDNN's) and once by torch's `@` (`matmul`). Beside them stands what torch does with whole logits: F.linear,
log_softmax and the entropy. Sides take turns; the figures are medians of CPU seconds, which other work on the machine disturbs
less than the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from machine import machine, versions
from on_device import add_device, work_clock
from result_files import write_results
from torch import Tensor

from nmoe.model.logprobs import head_logprobs
from nmoe.model.ops.table import ops_for

WAYS = ("training", "frozen head", "no gradient")


def ours(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    return head_logprobs(x_ND, weight_VD, targets_N)


def by_torch(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    logprobs_NV = F.linear(x_ND, weight_VD).float().log_softmax(-1)
    with torch.no_grad():  # a metric, as in most recipes
        entropy_N = -torch.linalg.vecdot(logprobs_NV.exp(), logprobs_NV)
    return logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1), entropy_N


def products(x_ND: Tensor, weight_VD: Tensor, way: str) -> None:
    """The matrix products alone."""
    with torch.no_grad():
        ops = ops_for(x_ND)
        logits_NV = ops.linear(x_ND, weight_VD)
        if way != "no gradient":
            ops.input_gradient(logits_NV, weight_VD)
        if way == "training":
            ops.weight_gradient(x_ND, logits_NV)


@torch.no_grad()
def matmul(x_ND: Tensor, weight_VD: Tensor, way: str) -> None:
    """The same by torch's operator."""
    logits_NV = x_ND @ weight_VD.t()
    if way != "no gradient":
        logits_NV @ weight_VD
    if way == "training":
        logits_NV.t() @ x_ND


Side = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def run(side: Side, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, way: str) -> Tensor:
    x_ND, weight_VD = x_ND.detach(), weight_VD.detach()
    with torch.set_grad_enabled(way != "no gradient"):
        x_ND.requires_grad_(way != "no gradient")
        weight_VD.requires_grad_(way == "training")
        logprobs_N, _ = side(x_ND, weight_VD, targets_N)
        if way != "no gradient":
            logprobs_N.sum().backward()
    return logprobs_N.detach()


def seconds(work: Callable[[], object], device: torch.device) -> float:
    began = work_clock(device)
    work()
    return work_clock(device) - began


def time_width(width: int, arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Medians in seconds of `work_clock` of every number of rows and every way, and what nmoe takes by what the others take."""
    generator, device = torch.Generator().manual_seed(0), arguments.device
    unit = "CPU s" if device.type == "cpu" else "s"
    weight = 0.05 * torch.randn(arguments.vocabulary, width, generator=generator).to(device)
    for rows in arguments.rows:
        x = torch.randn(rows, width, generator=generator).to(device)
        targets = torch.randint(arguments.vocabulary, (rows,), generator=generator).to(device)
        for way in arguments.ways:
            given = (x, weight, targets)
            sides: dict[str, Callable[[], object]] = {
                "nmoe": lambda given=given, way=way: run(ours, *given, way),
                "products": lambda given=given, way=way: products(*given[:2], way),
                "matmul": lambda given=given, way=way: matmul(*given[:2], way),
            }
            if not arguments.without_torch:
                sides["torch"] = lambda given=given, way=way: run(by_torch, *given, way)
                apart = run(ours, *given, way) - run(by_torch, *given, way)
                assert apart.abs().max() < 1e-3, f"log-probabilities differ by {apart.abs().max()}"
            taken: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(arguments.rounds):
                for name, work in sides.items():
                    taken[name].append(seconds(work, device))
            found = {name: statistics.median(each) for name, each in taken.items()}
            ratios = {f"nmoe / {name}": found["nmoe"] / found[name] for name in sides if name != "nmoe"}
            medians = {f"{name}, {unit}": each for name, each in found.items()}
            case = {key: round(value, 6 if unit == "s" else 3) for key, value in {**medians, **ratios}.items()}
            print(json.dumps({"width": width, "rows": rows, "way": way, **case}), flush=True)
            yield {"width": width, "rows": rows, "way": way, **case}


def main() -> None:
    parser = argparse.ArgumentParser(description="the head against plain products at a large vocabulary")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument(
        "--without-torch", action="store_true", help="leave torch's whole logits out, which take the most memory"
    )
    add_device(parser)
    parser.add_argument("--out", type=Path, help="where to write the results, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load_before = os.getloadavg()
    results = [case for width in arguments.width for case in time_width(width, arguments)]
    if arguments.out is not None:
        settings = {"vocabulary": arguments.vocabulary, "rounds": arguments.rounds, "device": str(arguments.device)}
        load = {"load_before": load_before, "load_after": os.getloadavg()}
        report = {**settings, **load, "machine": machine(), "versions": versions("torch"), "results": results}
        write_results(arguments.out, report)


if __name__ == "__main__":
    main()
