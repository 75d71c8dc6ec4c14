"""The learning-rate schedule: linear warm-up, then a cosine down to a floor."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, total_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Share of the peak learning rate at optimizer step `step` (from 0).

    Step s of the warm-up runs at (s + 1) / warmup_steps, so the first step is never a step of size zero. After it a half
    cosine falls from 1 to `min_lr_ratio`, which the last step reaches (Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
