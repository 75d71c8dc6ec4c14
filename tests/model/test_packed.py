"""Packed attention against softmax attention written out, over one sequence at a time."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen

from nmoe.model import packed
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.ops.cpu import library
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
    buckets = PackedAttention(lengths, CPU).bucketed.buckets
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


def fake_varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What torch documents of `varlen_attn`, a query at a time: key j is seen from query i where i - left <= j <= i + right, and
    a bound of -1 is none."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert enable_gqa == (q.shape[1] != k.shape[1])
    bounds = cu_seq_q.tolist()
    assert bounds == cu_seq_k.tolist()
    assert bounds[-1] == q.shape[0]
    assert max_q == max_k == max(b - a for a, b in pairwise(bounds))
    left, right = window_size
    rows = []
    for start, stop in pairwise(bounds):
        assert start < stop
        for i in range(start, stop):
            seen = slice(max(start, i - left) if left >= 0 else start, min(stop, i + right + 1) if right >= 0 else stop)
            for h in range(q.shape[1]):
                j = h * k.shape[1] // q.shape[1]
                rows.append((k[seen, j].float() @ q[i, h].float() * scale).softmax(0) @ v[seen, j].float())
    return torch.stack(rows).view(q.shape).to(q.dtype)


def fake_without_gqa(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """torch 2.11's, which knows of fewer key-value heads without being told."""
    return fake_varlen_attn(
        *args, scale=scale, window_size=window_size, enable_gqa=args[0].shape[1] != args[1].shape[1]
    )


@pytest.mark.parametrize("kernel", [fake_varlen_attn, fake_without_gqa])
@pytest.mark.parametrize("width", [(16, 16), (20, 20), (24, 16)], ids=["fits", "padded", "latent"])
@pytest.mark.parametrize("window", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_variable_length_kernel_is_told_the_right_things(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, width: tuple[int, int], window: int, kv_heads: int
) -> None:
    """On CPU, with the kernel as its documentation has it; buckets compute the same in fp32."""
    monkeypatch.setattr(packed, "_VARLEN_DEVICES", ("cpu",))
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    lengths = [5, 0, 1, 7]
    generator = torch.Generator().manual_seed(window)
    shapes = [(13, 2, width[0]), (13, kv_heads, width[0]), (13, kv_heads, width[1])]
    qkv = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    upstream = torch.randn(13, 2, width[1], generator=generator)
    layer = AttentionLayer(0, 0.3, window)
    results = []
    for attend, dtype in (
        (PackedAttention(lengths, CPU), torch.bfloat16),
        (packed._BucketedAttention(lengths, CPU, None, exact=False), torch.float32),
    ):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in qkv]
        out = attend(layer, *leaves)
        assert out.dtype == dtype
        out.backward(upstream.to(dtype))
        results.append([out.detach(), *(x.grad for x in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=3e-2, atol=3e-2)


def test_variable_length_kernel_sees_rows_that_sequences_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences 0 1 2 and 0 1 3 of four rows: whoever shares a row gets what both would have computed."""
    monkeypatch.setattr(packed, "_VARLEN_DEVICES", ("cpu",))
    monkeypatch.setattr(varlen, "varlen_attn", fake_varlen_attn)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 1, 8, generator=generator).bfloat16() for _ in range(3))
    shared = torch.tensor([0, 1, 2, 5]), torch.tensor([0, 1, 2, 0, 1, 3])
    out = PackedAttention([3, 3], CPU, shared=shared)(AttentionLayer(0, 0.3), q, k, v)
    layer = AttentionLayer(0, 0.3)
    first = naive(layer, *(x[:3].float() for x in (q, k, v)))
    second = naive(layer, *(x[[0, 1, 3]].float() for x in (q, k, v)))
    torch.testing.assert_close(out.float(), torch.cat([first, second[2:]]), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"exact": True}, False),
        ({"dtype": torch.float32}, False),
        ({"sinks": True}, False),
        ({"width": 264}, False),
    ],
    ids=str,
)
def test_what_the_variable_length_kernel_can_not_do_goes_to_the_buckets(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], taken: bool
) -> None:
    settings = {"exact": False, "dtype": torch.bfloat16, "sinks": False, "width": 16} | changes
    calls = []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return fake_varlen_attn(*args, **options)

    monkeypatch.setattr(packed, "_VARLEN_DEVICES", ("cpu",))
    monkeypatch.setattr(varlen, "varlen_attn", counted)
    x = torch.randn(3, 1, settings["width"], generator=torch.Generator().manual_seed(0)).to(settings["dtype"])
    layer = AttentionLayer(0, 0.1, sinks_H=torch.zeros(1) if settings["sinks"] else None)
    out = PackedAttention([3], CPU, settings["exact"])(layer, x, x, x)
    assert bool(calls) == taken
    torch.testing.assert_close(out.float(), naive(layer, *[x.float()] * 3), rtol=2e-2, atol=2e-2)


# The second sequence is the first and six rows more, the third is nothing but the beginning of the first, and the last shares 45
# rows with the fourth.
SHARING = [9, 15, 6, 80, 0, 70]
RUN = [*range(9), *range(18, 24), *range(30, 110), *range(155, 180)]
PLACES = [*range(9), *range(15), *range(6), *range(15, 95), *range(15, 60), *range(95, 120)]


@pytest.mark.skipif(library.library() is None, reason="the kernel needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "width", "value_width"), [((6, 2), 64, 64), ((3, 3), 24, 8), ((4, 1), 40, 72)])
def test_the_kernel_and_its_gradients_equal_those_in_double_precision(
    dtype: torch.dtype, heads: tuple[int, int], width: int, value_width: int
) -> None:
    shared = torch.tensor(RUN), torch.tensor(PLACES)
    long = [1, 40, 460], None  # more keys than a block of the backward pass
    generator = torch.Generator().manual_seed(0)
    for lengths, rows in ((SHARING, shared), long):
        count = sum(lengths) if rows is None else len(rows[0])
        shapes = [(heads[0], width), (heads[1], width), (heads[1], value_width), (heads[0], value_width)]
        *inputs, upstream = (torch.randn(count, *shape, generator=generator).to(dtype) for shape in shapes)
        layer = AttentionLayer(0, width**-0.5, window=500)
        expected = [x.double().requires_grad_() for x in inputs]
        wide = PackedAttention(lengths, CPU, shared=rows)(layer, *expected)
        wide.backward(upstream.double())
        found = [x.clone().requires_grad_() for x in inputs]
        out = PackedAttention(lengths, CPU, shared=rows)(layer, *found)
        assert type(out.grad_fn).__name__ == "AttentionInClustersBackward"
        out.backward(upstream)
        for mine, other in zip((out, *(x.grad for x in found)), (wide, *(x.grad for x in expected)), strict=True):
            assert mine is not None
            assert other is not None
            error = (mine.double() - other).abs().max() / other.abs().max()
            assert error < (1e-6 if dtype == torch.float32 else 8e-3)  # bf16 stores 8 bits


@pytest.mark.skipif(library.library() is None, reason="the kernel needs a C++ compiler")
def test_the_kernel_leaves_windows_and_sinks_to_torch() -> None:
    x = torch.randn(9, 2, 8)
    for layer in (AttentionLayer(0, 0.5, window=4), AttentionLayer(0, 0.5, sinks_H=torch.zeros(2))):
        out = PackedAttention([9], CPU)(layer, x.requires_grad_(), x, x)
        assert type(out.grad_fn).__name__ != "AttentionInClustersBackward"
