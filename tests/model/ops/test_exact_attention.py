"""Attention: exact in any pack by the decode kernel or in sums without an order, and in blocks of queries as on accelerators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.ops import attention as attention_ops
from nmoe.model.ops.attention import AttentionLayer, attention_in_blocks, causal_attention
from nmoe.model.ops.exact.order_free import attention
from nmoe.model.packed import PackedAttention

CPU = torch.device("cpu")
LENGTHS = [1, 40, 16, 0, 17, 70]


def tensors(dtype: torch.dtype, width: int, value_width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(width)
    shapes = [(sum(LENGTHS), 4, width), (sum(LENGTHS), 2, width), (sum(LENGTHS), 2, value_width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def layer_of(window: int, sinks: Tensor | None) -> AttentionLayer:
    return AttentionLayer(0, 0.3, window, sinks)


@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (20, 8)])
def test_values_and_gradients(window: int, with_sinks: bool, width: int, value_width: int) -> None:
    results = []
    for dtype, exact in ((torch.float32, True), (torch.float64, False)):
        inputs = tensors(dtype, width, value_width)
        inputs += [torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype)] if with_sinks else []
        inputs = [x.requires_grad_() for x in inputs]
        layer = layer_of(window, inputs[3] if with_sinks else None)
        out = PackedAttention(LENGTHS, CPU, exact)(layer, *inputs[:3])
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append((out, *torch.autograd.grad(out, inputs, upstream.to(dtype))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 20])
def test_bits_depend_on_nothing_else(window: int) -> None:
    """Alone, in a pack, cut off earlier, and with gradient or without."""
    q, k, v = tensors(torch.float32, 32, 32)
    layer, start = layer_of(window, None), 0
    whole = PackedAttention(LENGTHS, CPU, exact=True)(layer, q, k, v)
    with torch.no_grad():
        assert torch.equal(PackedAttention(LENGTHS, CPU, exact=True)(layer, q, k, v), whole)
        for length in LENGTHS:
            for stop in {start + (length + 1) // 2, start + length} - {start}:
                own = slice(start, stop)
                alone = PackedAttention([stop - start], CPU, exact=True)(layer, q[own], k[own], v[own])
                assert torch.equal(alone, whole[own])
            start += length


def test_rows_that_sequences_share() -> None:
    """Two sequences of 5 and 6 tokens that begin with the same 3."""
    rows_S, place_T = torch.tensor([0, 1, 2, 3, 4, 8, 9, 10]), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7])
    q, k, v = (x[:8] for x in tensors(torch.float32, 16, 16))
    layer = layer_of(0, None)
    shared = PackedAttention([5, 6], CPU, True, (rows_S, place_T))(layer, q, k, v)
    plain = PackedAttention([5, 6], CPU, True)(layer, q[place_T], k[place_T], v[place_T])
    assert torch.equal(shared, plain[rows_S])


@pytest.mark.parametrize("with_sinks", [False, True])
def test_many_small_weights_beside_a_large_one_add_up(with_sinks: bool) -> None:
    """Without kernels, weights are rounded to a grid: 20,000 keys of e^-16 each hold 0.2% of the attention."""
    keys, low = 20_000, -16.0
    scores = torch.full((keys,), low)
    scores[0] = 0.0
    k_BJSC = torch.cat([scores[:, None], torch.zeros(keys, 3)], 1)[None, None]
    q_BHLC = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    v_BJSU = torch.ones(1, 1, keys, 2)
    v_BJSU[:, :, 0] = 0.0
    sinks_H = torch.tensor([low]) if with_sinks else None
    layer = AttentionLayer(0, 1.0, 0, sinks_H)
    (got,) = attention(layer, q_BHLC, k_BJSC, v_BJSU, torch.ones(1, keys, dtype=torch.bool)).flatten()[:1]
    small = torch.tensor(low, dtype=torch.float64).exp()
    wanted = (keys - 1) * small / (1 + (keys - 1 + with_sinks) * small)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=0)


CASES = {
    "after a prefix": (40, 23, 0, False),
    "window": (0, 50, 8, False),
    "window after a prefix": (33, 30, 8, False),
    "window wider than a block": (5, 60, 20, False),
    "sinks after a prefix": (19, 21, 0, True),
    "sinks and window": (0, 45, 8, True),
    "sinks and window after a prefix": (30, 20, 8, True),
    "one query": (12, 1, 0, True),
    "whole": (0, 20, 0, False),
    "whole with sinks": (0, 20, 0, True),
}


def inputs(earlier: int, length: int, window: int, sinks: bool) -> tuple[AttentionLayer, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    layer = AttentionLayer(0, 0.3, window, draw(6) if sinks else None)
    return layer, [draw(2, 6, length, 16), draw(2, 2, earlier + length, 16), draw(2, 2, earlier + length, 8)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", [7, 16, 512])
def test_it_is_the_same_in_blocks_and_so_is_its_gradient(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_ops, "BLOCK_QUERIES", block)
    results = []
    for attend in (attention_in_blocks, causal_attention):
        layer, (q, k, v) = inputs(*CASES[name])
        out = attend(layer, q, k, v, CASES[name][0])
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        sinks = [] if layer.sinks_H is None else [layer.sinks_H.grad]
        results.append([out, q.grad, k.grad, v.grad, *sinks])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_no_mask_is_larger_than_a_block_of_queries_times_the_keys_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_ops, "BLOCK_QUERIES", 16)
    masks: list[tuple[int, ...]] = []
    original = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **named: object) -> Tensor:
        masks.append(tuple(mask.shape))
        # CUDA's kernels with a mask take as many key heads as query heads; a view costs no memory.
        assert q.shape[:2] == k.shape[:2] == v.shape[:2]
        assert k.stride(1) == v.stride(1) == 0
        assert not named.get("enable_gqa")
        return original(q, k, v, mask, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    layer, rows = inputs(1000, 40, 24, False)
    attention_in_blocks(layer, *rows, 1000)
    assert masks == [(16, 39), (16, 39), (8, 31)]
    masks.clear()
    layer, rows = inputs(100, 40, 0, False)
    attention_in_blocks(layer, *rows, 100)
    assert masks == [(16, 116), (16, 132), (8, 140)]
