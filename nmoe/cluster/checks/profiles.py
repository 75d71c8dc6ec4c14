"""Checks of experts in few bits: ranks quantise what one process quantises, and train, save and export the same."""

from __future__ import annotations

import torch.distributed as dist

from nmoe.cluster.checks.cases import batch_of, model_of
from nmoe.cluster.checks.training import (
    EXACT,
    all_axes,
    along,
    batches,
    export_both,
    learner_of,
    logprobs,
    shared_directory,
    some_axes,
)
from nmoe.cluster.checks.twins import Twins
from nmoe.config.tables.model import ExpertProfile
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.parallel.ranks import Ranks


def check_profiles(brief: bool) -> str:
    """Experts in each profile learn on ranks as in one process, are resumed, and are exported to the same bytes. What is gathered
    for a pass is quantised anew: after a step it has other values in the same place."""
    world, worst = dist.get_world_size(), 0.0
    steps = batches(brief, 4)
    axes = [all_axes(world)[0], some_axes(True)[-1]] if brief else all_axes(world)
    profiles: list[ExpertProfile] = ["fp8", "nvfp4"] if brief else ["fp8", "nvfp4", "bf16"]
    pairs = 0
    for profile in profiles:

        def make(ranks: Ranks, profile: ExpertProfile = profile) -> Learner:
            # NVFP4 has blocks of 16.
            return learner_of(model_of("qwen3_moe", expert_profile=profile, expert_width=16), ranks)

        # In brief NVFP4 is left out where experts are not divided.
        some = axes[1:] if brief and profile == "nvfp4" else axes
        for parallel, pair in zip(some, along(some, make, profile), strict=True):
            pair.train(steps[:3], cross_entropy)
            pair.both("log-probabilities", logprobs(batch_of((6, 5, 9), 8)))
            with shared_directory() as directory:
                export_both(pair, directory)
                (directory / "saved").mkdir(exist_ok=True)
                pair.ours.save(directory / "saved")
                resumed = Twins(make(Ranks(parallel)), pair.alone, EXACT, f"resumed {profile}")
                resumed.ours.load(directory / "saved")
                resumed.train(steps[3:], cross_entropy)
            worst, pairs = max(worst, pair.worst(), resumed.worst()), pairs + 1
    return f"{pairs} pairs of axes and profile, off by at most {worst:.0e}"
