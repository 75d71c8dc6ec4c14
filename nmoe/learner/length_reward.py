"""Rewards for length, to be added to a sample's score before its advantage is estimated."""

# Shapes: B samples.

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(tokens_B: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), `[B]` between 0 and -1: nothing up to
    `max_tokens - buffer_tokens` sampled tokens, then down in a straight line to -1 at `max_tokens`.

    A truncated answer tells little about the ones shortly before it; the slope says that length is the reason.
    """
    over_B = tokens_B.double() - (max_tokens - buffer_tokens)
    return (-over_B / buffer_tokens).clamp(-1.0, 0.0).float()


def length_penalty(tokens_B: Tensor, correct_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3), `[B]`: with `l = 0.5 - (n - min_g) / (max_g - min_g)` over the
    sampled tokens n of a group, `l` for a correct answer and `min(0, l)` for a wrong one; 0 where a group's lengths are all alike.
    """
    _, dense_B = torch.unique(group_ids_B, return_inverse=True)
    groups = int(dense_B.max()) + 1 if dense_B.numel() else 0
    tokens_B = tokens_B.double()
    extremes = [
        tokens_B.new_zeros(groups).scatter_reduce_(0, dense_B, tokens_B, how, include_self=False)[dense_B]
        for how in ("amin", "amax")
    ]
    spread_B = extremes[1] - extremes[0]
    share_B = 0.5 - (tokens_B - extremes[0]) / spread_B.clamp(min=1)
    share_B = torch.where(correct_B.bool(), share_B, share_B.clamp(max=0.0))
    return torch.where(spread_B > 0, share_B, 0.0).float()
