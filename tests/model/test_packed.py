"""Packed attention against softmax attention written out, over one sequence at a time."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nmoe.model.attention import AttentionLayer
from nmoe.model.packed import PackedAttention

CPU = torch.device("cpu")


def naive(layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
    """Causal softmax attention of one sequence, head by head and query by query."""
    tokens, heads, _ = q_THC.shape
    share = heads // k_TJC.shape[1]
    rows = []
    for t in range(tokens):
        seen = slice(max(0, t + 1 - layer.window) if layer.window else 0, t + 1)
        for h in range(heads):
            weights = (k_TJC[seen, h // share] @ q_THC[t, h] * layer.scale).exp()
            total = weights.sum() + (0 if layer.sinks_H is None else layer.sinks_H[h].exp())
            rows.append(weights / total @ v_TJU[seen, h // share])
    return torch.stack(rows).view(tokens, heads, -1)


def draw(lengths: list[int], heads: int, kv_heads: int, value_width: int = 4) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), n, width) for n, width in ((heads, 4), (kv_heads, 4), (kv_heads, value_width))]
    qkv = [2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return qkv, torch.randn(sum(lengths), heads, value_width, generator=generator, dtype=torch.float64)


def check(lengths: list[int], heads: int, kv_heads: int, value_width: int = 4, **features: Any) -> None:
    qkv, upstream = draw(lengths, heads, kv_heads, value_width)
    sinks = features.pop("sinks", None)
    inputs = [*qkv, *([] if sinks is None else [torch.tensor(sinks, dtype=torch.float64)])]
    packed = [x.clone().requires_grad_() for x in inputs]
    alone = [x.clone().requires_grad_() for x in inputs]
    scale = features.pop("scale", 0.5)
    ours, theirs = (
        AttentionLayer(0, scale, **features, sinks_H=None if sinks is None else x[3]) for x in (packed, alone)
    )
    out = PackedAttention(lengths, CPU)(ours, *packed[:3])
    parts = zip(*(x.split(lengths) for x in alone[:3]), strict=True)
    expected = torch.cat([naive(theirs, *part) for part in parts if part[0].shape[0]])
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    out.backward(upstream)
    expected.backward(upstream)
    for mine, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths",
    [[1], [7], [3, 3, 3], [9, 5, 2], [2, 9, 5], [1, 0, 6, 0, 1], [0, 4], [4, 0], [10, 9, 8, 7, 1], [5, 6, 5, 6]],
    ids=str,
)
def test_values_and_gradients_equal_one_by_one(lengths: list[int], kv_heads: int) -> None:
    check(lengths, 4, kv_heads)


SINKS = [0.5, -2.0, 3.0, 0.0]


@pytest.mark.parametrize("lengths", [[1], [7], [9, 5, 2], [2, 9, 5], [4, 4]], ids=str)
@pytest.mark.parametrize(
    "features",
    [
        {"scale": 0.3},
        {"window": 1},
        {"window": 4},
        {"sinks": SINKS},
        {"sinks": SINKS, "window": 3, "scale": 0.7},
        {"value_width": 3},
        {"value_width": 2, "sinks": SINKS, "window": 2},
    ],
    ids=str,
)
def test_scale_window_sinks_and_narrow_values(lengths: list[int], features: dict[str, Any]) -> None:
    check(lengths, 4, 2, **features)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=7).filter(any))
def test_any_lengths_in_any_order(lengths: list[int]) -> None:
    check(lengths, 2, 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_padding_stays_below_a_quarter(lengths: list[int]) -> None:
    buckets = PackedAttention(lengths, CPU).buckets
    assert sorted(n for bucket in buckets for n in bucket.lengths) == sorted(lengths)
    padded = sum(len(bucket.lengths) * bucket.longest for bucket in buckets)
    assert padded <= 1.25 * sum(lengths)


def test_sequences_do_not_see_one_another() -> None:
    lengths = [4, 6, 5]
    (q, k, v), _ = draw(lengths, 2, 2)
    before = PackedAttention(lengths, CPU)(AttentionLayer(0, 0.5), q, k, v)
    k[4:10], v[4:10] = 50.0, -50.0
    after = PackedAttention(lengths, CPU)(AttentionLayer(0, 0.5), q, k, v)
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[10:], after[10:])
    assert not torch.equal(before[4:10], after[4:10])
