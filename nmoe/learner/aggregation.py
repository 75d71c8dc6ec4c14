"""Per-token weights: mask, reduction and global denominator in one, fixed once per optimizer batch.

The denominators count the whole optimizer batch, never a micro-batch or a rank: averaging averages is the classical way in
which gradient accumulation goes wrong.
"""

# Shapes: T predicting positions, B sequences.

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]


def token_weights(
    aggregation: Aggregation,
    scored_T: Tensor,
    lengths: Sequence[int],
    constant_length: int | None = None,
    samples: Sequence[int] | None = None,
) -> Tensor:
    """Weights `[T]`, zero where a position is not scored.

    - `token`: 1 / (scored tokens of the batch), DAPO's mean (arXiv:2503.14476, eq. 8);
    - `sequence`: 1 / (sequences x the sequence's own scored tokens), GRPO's mean of means (arXiv:2402.03300, eq. 3);
    - `constant`: 1 / (sequences x constant_length), free of length bias (arXiv:2503.20783, section 3.1).

    Where several sequences are the branches of one sample, `samples` says which each is of, and the sample counts as one sequence
    with the scored tokens of all of them.
    """
    scored = scored_T.to(torch.float32)
    if aggregation == "token":
        return scored / scored.sum().clamp(min=1)
    count = len(lengths) if samples is None else len(set(samples))
    if aggregation == "constant":
        if not constant_length:
            raise ValueError("aggregation 'constant' divides by a length that has to be given")
        return scored / (count * constant_length)
    counts_B = torch.stack([part.sum() for part in scored.split(list(lengths))])
    if samples is not None:
        _, of_B = torch.unique(torch.tensor(samples), return_inverse=True)
        counts_B = counts_B.new_zeros(count).index_add_(0, of_B, counts_B)[of_B]
    return scored / (count * torch.repeat_interleave(counts_B.clamp(min=1), torch.tensor(lengths)))
