"""Packed attention against softmax attention written out, over one sequence at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nmoe.model.packed import PackedAttention

CPU = torch.device("cpu")


def naive(q_THC: Tensor, k_TJC: Tensor, v_TJC: Tensor) -> Tensor:
    """Causal softmax attention of one sequence, head by head and query by query."""
    tokens, heads, width = q_THC.shape
    share = heads // k_TJC.shape[1]
    rows = []
    for t in range(tokens):
        for h in range(heads):
            scores = k_TJC[: t + 1, h // share] @ q_THC[t, h] / width**0.5
            rows.append(scores.softmax(0) @ v_TJC[: t + 1, h // share])
    return torch.stack(rows).view(tokens, heads, width)


def draw(lengths: list[int], heads: int, kv_heads: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), n, 4) for n in (heads, kv_heads, kv_heads)]
    qkv = [2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return qkv, torch.randn(shapes[0], generator=generator, dtype=torch.float64)


def check(lengths: list[int], heads: int, kv_heads: int) -> None:
    qkv, upstream = draw(lengths, heads, kv_heads)
    packed = [x.clone().requires_grad_() for x in qkv]
    alone = [x.clone().requires_grad_() for x in qkv]
    out = PackedAttention(lengths, CPU)(0, *packed)
    parts = zip(*(x.split(lengths) for x in alone), strict=True)
    expected = torch.cat([naive(*part) for part in parts if part[0].shape[0]])
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    out.backward(upstream)
    expected.backward(upstream)
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths",
    [[1], [7], [3, 3, 3], [9, 5, 2], [2, 9, 5], [1, 0, 6, 0, 1], [0, 4], [4, 0], [10, 9, 8, 7, 1], [5, 6, 5, 6]],
    ids=str,
)
def test_values_and_gradients_equal_one_by_one(lengths: list[int], kv_heads: int) -> None:
    check(lengths, 4, kv_heads)


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
    before = PackedAttention(lengths, CPU)(0, q, k, v)
    k[4:10], v[4:10] = 50.0, -50.0
    after = PackedAttention(lengths, CPU)(0, q, k, v)
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[10:], after[10:])
    assert not torch.equal(before[4:10], after[4:10])
