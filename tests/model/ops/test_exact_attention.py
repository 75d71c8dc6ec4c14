"""Exact attention, by the decode kernel or in sums without an order: the same bits in any pack, and the definition's gradients."""

import pytest
import torch
from torch import Tensor

from nmoe.model.ops.attention import AttentionLayer
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
