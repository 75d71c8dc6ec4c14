"""Paged caches with the layer, the queries and the table that read them, for the tests of decode attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nmoe.model.ops.attention import AttentionLayer

BLOCK = 16


@dataclass
class Cache:
    """Rows of `lengths` in blocks that lie in no order. What no row may look at is NaN, and so is no index that none may follow."""

    lengths: list[int]
    heads: int
    kv_heads: int
    width: int
    value_width: int
    window: int = 0
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    spare_blocks: int = 2

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.lengths) + self.width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        used = [-(-length // BLOCK) for length in self.lengths]
        blocks = max(used) + self.spare_blocks
        order = torch.randperm(sum(used) + 1, generator=generator).tolist()
        self.table_BM = torch.full((len(used), blocks), 2**30, dtype=torch.int32)
        self.keys_NJPC = torch.full((len(order), self.kv_heads, BLOCK, self.width), torch.nan, dtype=self.dtype)
        self.values_NJPU = torch.full((len(order), self.kv_heads, BLOCK, self.value_width), torch.nan, dtype=self.dtype)
        self.rows = []
        for row, length in enumerate(self.lengths):
            k_LJC, v_LJU = normal(length, self.kv_heads, self.width), normal(length, self.kv_heads, self.value_width)
            for at in range(length):
                if at % BLOCK == 0:
                    self.table_BM[row, at // BLOCK] = order.pop()
                block = int(self.table_BM[row, at // BLOCK])
                self.keys_NJPC[block, :, at % BLOCK] = k_LJC[at]
                self.values_NJPU[block, :, at % BLOCK] = v_LJU[at]
            self.rows.append((k_LJC, v_LJU))
        self.q_BHC = normal(len(used), self.heads, self.width)
        sinks_H = normal(self.heads) if self.sinks else None
        self.layer = AttentionLayer(0, 1.3 * self.width**-0.5, self.window, sinks_H)
        self.lengths_B = torch.tensor(self.lengths, dtype=torch.int32)

    def of(self, dtype: torch.dtype) -> Cache:
        """The same in another type."""
        return replace(self, dtype=dtype)

    def arguments(self, rows: slice = slice(None), blocks: int | None = None) -> tuple[AttentionLayer | Tensor, ...]:
        table_BM = self.table_BM[rows, :blocks].contiguous()
        return self.layer, self.q_BHC[rows], self.keys_NJPC, self.values_NJPU, table_BM, self.lengths_B[rows]

    def by_loop(self) -> Tensor:
        """Softmax attention written out, a row and a head at a time."""
        out_BHU = torch.zeros(len(self.lengths), self.heads, self.value_width, dtype=self.dtype)
        for row, (k_LJC, v_LJU) in enumerate(self.rows):
            seen = slice(max(0, self.lengths[row] - self.window) if self.window else 0, None)
            for head in range(self.heads if self.lengths[row] else 0):
                kv_head = head * self.kv_heads // self.heads
                weights = (k_LJC[seen, kv_head] @ self.q_BHC[row, head] * self.layer.scale).exp()
                sink = 0 if self.layer.sinks_H is None else self.layer.sinks_H[head].exp()
                out_BHU[row, head] = weights / (weights.sum() + sink) @ v_LJU[seen, kv_head]
        return out_BHU


SHAPES = {
    "one query head per key head": Cache([1, 15, 16, 17, 50], 2, 2, 16, 16),
    "groups of heads": Cache([33, 5], 6, 2, 32, 32),
    "all heads on one": Cache([20, 40], 8, 1, 16, 16),
    "window": Cache([1, 19, 20, 21, 70], 4, 2, 16, 16, window=20),
    "window of one": Cache([1, 16, 17], 4, 2, 16, 16, window=1),
    "sinks": Cache([1, 30], 4, 2, 16, 16, sinks=True),
    "window and sinks": Cache([3, 60], 4, 2, 16, 16, window=9, sinks=True),
    "width 80": Cache([7, 45], 4, 2, 80, 80),
    "latent": Cache([7, 45], 2, 2, 192, 128),
    "an empty row": Cache([0, 18], 4, 2, 16, 16),
    "an empty row with sinks": Cache([0, 18], 4, 2, 16, 16, sinks=True),
}
