"""Decode attention over blocks: the reference against a loop, the Triton kernel, interpreted on CPU, against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nmoe.model.attention import AttentionLayer
from nmoe.model.kernels.paged_attention import paged_attention, paged_attention_reference

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


@pytest.mark.parametrize("cache", SHAPES.values(), ids=SHAPES)
def test_reference_equals_the_loop(cache: Cache) -> None:
    out = paged_attention(*cache.arguments())  # on CPU that is the reference
    torch.testing.assert_close(out, cache.by_loop(), rtol=1e-9, atol=1e-9)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="the interpreter comes with triton")
    language = pytest.importorskip("triton.language")
    plain_dot = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != language.bfloat16:
            return x
        data = interpreter._convert_float(x.data, language.bfloat16, language.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, language.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter (triton 3.7) multiplies the bits of bf16 as integers."""
        return plain_dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    from nmoe.model.kernels import paged_attention_triton

    return paged_attention_triton


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cache", SHAPES.values(), ids=SHAPES)
def test_kernel_equals_the_reference(kernels: ModuleType, cache: Cache, dtype: torch.dtype) -> None:
    cache = Cache(**{f: getattr(cache, f) for f in cache.__dataclass_fields__} | {"dtype": dtype})
    out = kernels.paged_attention_triton(*cache.arguments())
    assert out.dtype == dtype
    expected = paged_attention_reference(*cache.arguments())
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (0, True), (150, True)])
def test_splits_join_to_the_whole(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, window: int, sinks: bool
) -> None:
    monkeypatch.setattr(kernels, "SPLIT_POSITIONS", 32)
    monkeypatch.setattr(kernels, "TILE_POSITIONS", 16)
    monkeypatch.setattr(kernels, "_JOIN", 4)  # the last row has 6 splits: joined in two goes
    cache = Cache([1, 32, 33, 100, 190], 4, 2, 16, 16, window, sinks, torch.float32)
    expected = paged_attention_reference(*cache.arguments())
    torch.testing.assert_close(kernels.paged_attention_triton(*cache.arguments()), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_does_not_depend_on_the_others(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, sinks: bool) -> None:
    """To the bit: alone a row of one split is not joined, beside longer rows it is."""
    monkeypatch.setattr(kernels, "SPLIT_POSITIONS", 32)
    cache = Cache([30, 5, 120], 4, 2, 32, 32, sinks=sinks, dtype=torch.float32)
    together = kernels.paged_attention_triton(*cache.arguments())
    for row, blocks in ((0, 2), (1, 1), (2, 8)):
        alone = kernels.paged_attention_triton(*cache.arguments(slice(row, row + 1), blocks))
        assert torch.equal(alone[0], together[row])


def test_any_strides(kernels: ModuleType) -> None:
    """Queries are slices of a wider projection, caches slices of all layers'."""
    cache = Cache([9, 40], 4, 2, 16, 16, dtype=torch.float32)
    expected = paged_attention_reference(*cache.arguments())
    layer, q_BHC, keys, values, table, lengths = cache.arguments()
    wide = torch.zeros(2, 7, 24)
    wide[:, 1:5, 3:19] = q_BHC
    apart = torch.zeros(keys.shape[1], keys.shape[0], *keys.shape[2:]).transpose(0, 1)
    apart.copy_(keys)
    out = kernels.paged_attention_triton(layer, wide[:, 1:5, 3:19], apart, values, table, lengths)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
