"""What each rank of `test_rank_checks` runs: the checks that are named or, without a name, damaged pairs.

Damaged pairs show whether comparisons notice what is wrong with one rank: the last of three pairs of a learner on ranks and one in
one process, which has computed for the first two, is damaged on rank 1 alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from nmoe.errors import ShortfallError
from nmoe.learner.objectives import cross_entropy
from nmoe.parallel.ranks import local
from nmoe.rank_checks.run import run_checks
from nmoe.rank_checks.training import all_axes, along, batches, learner_of
from nmoe.rank_checks.twins import Twins, model_of


def gradient(pair: Twins, amount: float) -> None:
    grad = pair.ours.model.embedding.weight.grad
    assert grad is not None
    local(grad).add_(amount)


def weight(pair: Twins, amount: float) -> None:
    with torch.no_grad():
        local(pair.ours.model.embedding.weight).add_(amount)


DAMAGES: dict[str, tuple[str, Callable[[Twins, float], None], float]] = {
    "a gradient": ("gradients", gradient, 1e-6),
    "a weight that is no number": ("weights", weight, float("nan")),
    "a weight": ("weights", weight, 1e-6),
}


def check(name: str) -> list[str]:
    """What this rank finds of each pair."""
    (before, damage, amount), said = DAMAGES[name], []
    axes = all_axes(2)
    for number, pair in enumerate(along(axes, lambda ranks: learner_of(model_of("qwen3_moe"), ranks), name)):
        if number == len(axes) - 1:
            compare = getattr(pair, before)

            def damaged(pair: Twins = pair, compare: Callable[[], None] = compare) -> None:
                if dist.get_rank() == 1:
                    damage(pair, amount)
                compare()

            setattr(pair, before, damaged)
        pair.train(batches(True, 2)[1:], cross_entropy)
        try:
            said.append(f"{number}: {pair.worst() < 1e-9}")
        except ShortfallError as error:
            said.append(f"{number}: {error}")
    try:
        pair.alone.rewound().result("something else", lambda learner: None)
    except ValueError as error:
        said.append(str(error))
    return said


def show_damages() -> None:
    said: list[list[str]] = [[], []]
    dist.all_gather_object(said, [line for name in DAMAGES for line in check(name)])
    # By one rank alone: lines of two run into each other.
    if dist.get_rank() == 0:
        print(*said[0], *said[1], sep="\n")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if names := sys.argv[1:]:
        run_checks(names, say=lambda line: print(line, flush=True), deadline_s=60, brief=True)
    else:
        show_damages()
    dist.destroy_process_group()
