"""Causal attention within packed sequences, on any device, with no mask that is quadratic in the pack.

torch has no variable-length attention with a backward on CPU. Sequences are therefore taken longest first and cut into
length buckets, each padded to its longest member at the end, where a causal kernel needs no mask: a real token never
looks at padding.
"""

# Shapes: T packed tokens, N heads, C head width; a bucket has B sequences of length at most L.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# A bucket ends where a sequence is shorter than this share of the bucket's longest: lower wastes arithmetic on padding,
# higher launches more kernels.
_BUCKET_SHARE = 0.8


@dataclass
class _Bucket:
    """A run of sequences of similar length: its span of tokens, and where they stand in the padded block (None: there is
    no padding)."""

    start: int
    lengths: list[int]

    def __post_init__(self) -> None:
        self.longest = self.lengths[0]
        self.stop = self.start + sum(self.lengths)
        self.rows_T: Tensor | None = None
        if self.lengths[-1] != self.longest:
            firsts = range(0, len(self.lengths) * self.longest, self.longest)
            spans = [torch.arange(first, first + n) for first, n in zip(firsts, self.lengths, strict=True)]
            self.rows_T = torch.cat(spans)

    def block(self, x_TNC: Tensor) -> Tensor:
        """The bucket's rows of a packed tensor as `[B, N, L, C]`."""
        part_TNC = x_TNC[self.start : self.stop]
        if self.rows_T is not None:
            padded_TNC = part_TNC.new_zeros(len(self.lengths) * self.longest, *part_TNC.shape[1:])
            part_TNC = padded_TNC.index_copy(0, self.rows_T, part_TNC)
        return part_TNC.reshape(len(self.lengths), self.longest, *part_TNC.shape[1:]).transpose(1, 2)


class PackedAttention:
    """An `Attend` over sequences laid end to end; `lengths` gives their lengths in that order. `exact` attends in fp64."""

    def __init__(self, lengths: Sequence[int], device: torch.device, exact: bool = False) -> None:
        self.exact = exact
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        self.gather_T: Tensor | None = None
        if order != list(range(len(lengths))):
            starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
            self.gather_T = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order]).to(device)
            self.back_T = self.gather_T.argsort()
        self.buckets: list[_Bucket] = []
        run: list[int] = []
        for length in [lengths[i] for i in order if lengths[i]] + [0]:
            if run and length < _BUCKET_SHARE * run[0]:
                start = self.buckets[-1].stop if self.buckets else 0
                self.buckets.append(_Bucket(start, run))
                run = []
            run.append(length)
        for bucket in self.buckets:
            bucket.rows_T = None if bucket.rows_T is None else bucket.rows_T.to(device)

    def __call__(self, layer: int, q_THC: Tensor, k_TJC: Tensor, v_TJC: Tensor) -> Tensor:
        if self.gather_T is not None:
            q_THC, k_TJC, v_TJC = (x.index_select(0, self.gather_T) for x in (q_THC, k_TJC, v_TJC))
        dtype = q_THC.dtype
        if self.exact:
            q_THC, k_TJC, v_TJC = q_THC.double(), k_TJC.double(), v_TJC.double()
        gqa = q_THC.shape[1] != k_TJC.shape[1]
        parts = []
        for bucket in self.buckets:
            q_BHLC, k_BJLC, v_BJLC = bucket.block(q_THC), bucket.block(k_TJC), bucket.block(v_TJC)
            o_BHLC = F.scaled_dot_product_attention(q_BHLC, k_BJLC, v_BJLC, is_causal=True, enable_gqa=gqa)
            o_THC = o_BHLC.transpose(1, 2).reshape(-1, *q_THC.shape[1:])
            parts.append(o_THC if bucket.rows_T is None else o_THC.index_select(0, bucket.rows_T))
        out_THC = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)
        return out_THC if self.gather_T is None else out_THC.index_select(0, self.back_T)
