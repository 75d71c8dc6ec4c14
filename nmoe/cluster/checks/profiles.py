"""Checks of experts in few bits: ranks quantise what one process quantises, and train, save and export the same."""

from __future__ import annotations

from itertools import product

import torch.distributed as dist

from nmoe.cluster.checks.cases import batch_of, model_of
from nmoe.cluster.checks.training import (
    all_axes,
    batches,
    export_both,
    learner_of,
    logprobs,
    shared_directory,
    some_axes,
    twins,
)
from nmoe.config.tables.model import ExpertProfile
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.parallel.ranks import Ranks


def check_profiles(brief: bool) -> str:
    """Experts in each profile learn on ranks as in one process, are resumed, and are exported to the same bytes. What is gathered
    for a pass is quantised anew: after a step it has other values in the same place."""
    world, worst = dist.get_world_size(), 0.0
    steps = batches(world, 4)
    axes = [all_axes(world)[0], some_axes(True)[-1]] if brief else all_axes(world)
    profiles: list[ExpertProfile] = ["fp8", "nvfp4"] if brief else ["fp8", "nvfp4", "bf16"]
    # In brief NVFP4 is left out where experts are not divided.
    pairs = [pair for pair in product(axes, profiles) if not brief or pair != (axes[0], "nvfp4")]
    for parallel, profile in pairs:

        def make(ranks: Ranks, profile: ExpertProfile = profile) -> Learner:
            # NVFP4 has blocks of 16.
            return learner_of(model_of("qwen3_moe", expert_profile=profile, expert_width=16), ranks)

        pair = twins(make, parallel, profile)
        pair.train(steps[:3], cross_entropy)
        pair.both("log-probabilities", logprobs(batch_of((6, 5, 9), 8)))
        with shared_directory() as directory:
            export_both(pair, directory)
            (directory / "saved").mkdir(exist_ok=True)
            pair.ours.save(directory / "saved")
            resumed = twins(make, parallel, f"resumed {profile}")
            resumed.alone = pair.alone
            resumed.ours.load(directory / "saved")
            resumed.train(steps[3:], cross_entropy)
        worst = max(worst, pair.worst, resumed.worst)
    return f"{len(pairs)} pairs of axes and profile, off by at most {worst:.0e}"
