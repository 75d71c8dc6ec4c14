"""Decode attention over blocks: the reference against a loop, the Triton kernel, interpreted on CPU, against the reference."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from paged_cases import SHAPES, Cache

from nmoe.model.ops.attention import paged_attention


@pytest.mark.parametrize("cache", SHAPES.values(), ids=SHAPES)
def test_reference_equals_the_loop(cache: Cache) -> None:
    out = paged_attention(*cache.arguments())
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
    from nmoe.model.ops.triton import paged_attention as kernels

    return kernels


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cache", SHAPES.values(), ids=SHAPES)
def test_kernel_equals_the_reference(kernels: ModuleType, cache: Cache, dtype: torch.dtype) -> None:
    cache = cache.of(dtype)
    out = kernels.paged_attention_triton(*cache.arguments())
    assert out.dtype == dtype
    expected = paged_attention(*cache.arguments())
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (0, True), (150, True)])
def test_splits_join_to_the_whole(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, window: int, sinks: bool
) -> None:
    monkeypatch.setattr(kernels, "SPLIT_POSITIONS", 32)
    monkeypatch.setattr(kernels, "TILE_POSITIONS", 16)
    monkeypatch.setattr(kernels, "_JOIN", 4)  # the last row has 6 splits: joined in two goes
    cache = Cache([1, 32, 33, 100, 190], 4, 2, 16, 16, window, sinks, torch.float32)
    expected = paged_attention(*cache.arguments())
    torch.testing.assert_close(kernels.paged_attention_triton(*cache.arguments()), expected, rtol=2e-6, atol=2e-6)


def test_a_row_may_fill_its_table_to_the_last_split(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SPLIT_POSITIONS", 32)
    monkeypatch.setattr(kernels, "TILE_POSITIONS", 16)
    cache = Cache([64, 30], 4, 2, 16, 16, dtype=torch.float32, spare_blocks=0)
    expected = paged_attention(*cache.arguments())
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
    expected = paged_attention(*cache.arguments())
    layer, q_BHC, keys, values, table, lengths = cache.arguments()
    wide = torch.zeros(2, 7, 24)
    wide[:, 1:5, 3:19] = q_BHC
    apart = torch.zeros(keys.shape[1], keys.shape[0], *keys.shape[2:]).transpose(0, 1)
    apart.copy_(keys)
    out = kernels.paged_attention_triton(layer, wide[:, 1:5, 3:19], apart, values, table, lengths)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
