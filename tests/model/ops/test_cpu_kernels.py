"""The C++ kernels of decoding on a CPU, each against torch's operations that it stands for."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from paged_cases import SHAPES, Cache
from tiny_models import DENSE, tiny_family
from torch import Tensor, nn

from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.engine.native.sampler import SamplingColumns, kept_mask, sample
from nmoe.errors import DivergenceError
from nmoe.learner.learner import Learner
from nmoe.model.checkpoint import new_model
from nmoe.model.config import ModelConfig
from nmoe.model.moe import MoE, Router, RouterTrace
from nmoe.model.ops.attention import AttentionLayer, causal_attention, paged_attention
from nmoe.model.ops.cpu import library, operations, packing
from nmoe.model.ops.cpu.packing import PackedWeights, kernels_in_use, panels
from nmoe.model.ops.table import ops_for
from nmoe.model.ops.torch import TorchOps
from nmoe.types import Sampling

OPS = TorchOps()

needs_kernels = pytest.mark.skipif(library.library() is None, reason="the kernels need Linux and a C++ compiler")

# Of sums in fp32, and of what is stored in bf16, whose last bit is 2^-8 of a number.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2}
DTYPES = list(TOLERANCE)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(ours: Tensor, theirs: Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=tolerance, atol=tolerance)


@contextmanager
def in_use() -> Iterator[None]:
    with torch.no_grad(), PackedWeights().active(), kernels_in_use():
        yield


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 2, 5), (14, 8, 32), (15, 6, 33), (300, 100, 70), (0, 4, 4)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_linear(rows: int, inputs: int, outputs: int, dtype: torch.dtype, biased: bool) -> None:
    x, weight = draw(rows, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype) / inputs**0.5
    bias = draw(outputs, dtype=dtype) if biased else None
    packed = packing.packed_panels(weight.t().unsqueeze(0))
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(operations.linear(x, packed, outputs, bias), expected)


@needs_kernels
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 2, 5), (15, 6, 33), (300, 100, 70), (0, 4, 4)])
def test_linear_of_bf16_in_fp32(rows: int, inputs: int, outputs: int) -> None:
    """As near to the true product as fp32 is: 2^-8 of it would be lost by rounding."""
    x, weight = draw(rows, inputs, dtype=torch.bfloat16), draw(outputs, inputs, dtype=torch.bfloat16)
    found = operations.linear_in_fp32(x, packing.packed_panels(weight.t().unsqueeze(0)), outputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 40], [0, 0, 1], [70, 0, 0]], ids=str)
@pytest.mark.parametrize("outputs", [5, 70])
def test_linear_by_group(dtype: torch.dtype, counts: list[int], outputs: int) -> None:
    x, weight = draw(sum(counts), 24, dtype=dtype), draw(3, 24, outputs, dtype=dtype) / 5
    expected = [part.double() @ weight[e].double() for e, part in enumerate(x.split(counts))]
    out = operations.linear_by_group(x, packing.packed_panels(weight), outputs, counts)
    close(out, torch.cat(expected))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 20, 48])
def test_swiglu_linear(dtype: torch.dtype, width: int) -> None:
    x, gate_up = draw(29, 24, dtype=dtype), draw(2 * width, 24, dtype=dtype) / 5
    packed = packing.packed_gate_up(gate_up.t().unsqueeze(0))
    expected = OPS.swiglu(F.linear(x.double(), gate_up.double()).to(dtype))
    close(operations.swiglu_linear(x, packed, width), expected)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(("width", "tokens"), [(16, 1), (20, 40)])
def test_experts(family: str, width: int, tokens: int, dtype: torch.dtype) -> None:
    model = tiny_family(family, expert_width=width)
    moe = next(module for module in model.modules() if isinstance(module, MoE)).to(dtype)
    moe.router.float()
    x = draw(tokens, 32, dtype=dtype)
    with in_use():
        weights_TK, chosen_TK = moe.router(x, RouterTrace())
        projections = moe._projections(dtype)
        at_once_TD = moe._at_once(x, weights_TK, chosen_TK, *projections)
        assert at_once_TD is not None
        close(at_once_TD, moe._routed(x, weights_TK, chosen_TK, *projections))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(("experts", "tokens"), [(6, 1), (16, 20), (40, 9)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing(family: str, experts: int, tokens: int, dtype: torch.dtype, renormalize: bool) -> None:
    changes = {"experts": experts, "renormalize": renormalize, "router_groups": 1, "router_groups_kept": 1}
    router = next(module for module in tiny_family(family, **changes).modules() if isinstance(module, Router))
    router.bias.copy_(0.1 * draw(experts))
    x = draw(tokens, 32, dtype=dtype)
    with torch.no_grad():
        weights_TK, chosen_TK = router(x, RouterTrace())
    trace = RouterTrace()
    with in_use():
        found_TK, ids_TK = router(x, trace)
    assert torch.equal(ids_TK, chosen_TK)
    assert torch.equal(trace.routes()[:, 0].long(), chosen_TK)
    torch.testing.assert_close(found_TK, weights_TK, rtol=2e-6, atol=1e-7)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, weight = draw(40, 64, dtype=dtype), draw(50, 64, dtype=dtype)
    packed = packing.packed_panels(weight.t().unsqueeze(0))
    whole = operations.linear(x, packed, 50, None)
    for rows in (slice(0, 1), slice(3, 20), slice(39, 40)):
        assert torch.equal(operations.linear(x[rows], packed, 50, None), whole[rows])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", SHAPES.values(), ids=SHAPES)
def test_attention(cache: Cache, dtype: torch.dtype) -> None:
    cache = cache.of(dtype)
    rows = [row for row, length in enumerate(cache.lengths) if length]
    lengths_B = cache.lengths_B[rows]
    q_BHC, table_BM = cache.q_BHC[rows], cache.table_BM[rows]
    expected = paged_attention(cache.layer, q_BHC, cache.keys_NJPC, cache.values_NJPU, table_BM, lengths_B)
    # The newest position comes as an argument, as part of rows that hold more.
    at_B = (lengths_B - 1).long()
    block_B = table_BM.long().gather(1, at_B.unsqueeze(1) // 16).squeeze(1)
    new = []
    for cached in (cache.keys_NJPC, cache.values_NJPU):
        rows_BJW = cached[block_B, :, at_B % 16]
        new.append(torch.cat([rows_BJW, rows_BJW], 1)[:, : rows_BJW.shape[1]])
        cached[block_B, :, at_B % 16] = torch.nan
    cached = (cache.keys_NJPC, cache.values_NJPU, table_BM.long(), at_B)
    close(operations.attention(cache.layer, q_BHC, *cached, new=(new[0], new[1])), expected)
    assert torch.equal(cache.keys_NJPC[block_B, :, at_B % 16], new[0])
    assert torch.equal(cache.values_NJPU[block_B, :, at_B % 16], new[1])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "widths"),
    [(1, 1, (1, 1), (2, 3)), (57, 57, (4, 2), (16, 16)), (300, 300, (2, 1), (40, 33)), (130, 400, (2, 2), (64, 64))],
)
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (0, True), (20, False), (150, True)])
def test_attention_of_many_queries(
    queries: int,
    keys: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    window: int,
    sinks: bool,
    dtype: torch.dtype,
) -> None:
    shapes = (queries, heads[0], widths[0]), (keys, heads[1], widths[0]), (keys, heads[1], widths[1])
    q, k, v = (draw(*shape, dtype=dtype, seed=i).transpose(0, 1) for i, shape in enumerate(shapes))
    layer = AttentionLayer(0, 1.5 * widths[0] ** -0.5, window, draw(heads[0]) if sinks else None)
    in_fp64 = [x.double().unsqueeze(0) for x in (q, k, v)]
    expected = causal_attention(layer, *in_fp64, keys - queries)[0]
    close(operations.causal_attention(layer, q, k, v), expected)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 16, 24, 40, 256])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = 3 * draw(5, 7, width, dtype=dtype), draw(width, dtype=dtype)
    close(operations.rms_norm(x, weight, 1e-5), OPS.rms_norm(x, weight, 1e-5))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [4, 16, 34, 64])
@pytest.mark.parametrize("normed", [True, False])
def test_norm_and_turn(width: int, normed: bool, dtype: torch.dtype) -> None:
    qkv, angles = draw(9, 7, width, dtype=dtype), draw(9, 1, width // 2)
    weights = draw(width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    q, k = qkv[:, :4], qkv[:, 4:6]
    if normed:
        q, k = OPS.rms_norm(q, weights[0], 1e-6), OPS.rms_norm(k, weights[1], 1e-6)
    expected = [OPS.rotate(x.contiguous(), angles.cos(), angles.sin()) for x in (q, k)]
    ours = qkv.clone()
    operations.norm_and_turn_(ours, (*weights, 1e-6) if normed else None, angles.cos(), angles.sin(), 4, 2)
    close(ours, torch.cat([*expected, qkv[:, 6:]], 1))


@needs_kernels
@pytest.mark.parametrize("vocabulary", [3, 64, 65, 1000])
def test_sampling(vocabulary: int) -> None:
    rows = 200
    logits = 3 * draw(rows, vocabulary)
    logits[:, 1] = float("-inf")
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(rows // 4)
    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(1))
    uniforms[:8] = 0
    columns = SamplingColumns(
        temperature, torch.ones(rows), torch.zeros(rows, dtype=torch.int64), plain=False, cuts=False
    )
    with torch.no_grad():
        tokens, logprobs, _ = sample(logits, columns, uniforms)  # torch's
        with kernels_in_use():
            found, scores, _ = sample(logits, columns, uniforms)
    assert torch.equal(found, tokens)
    torch.testing.assert_close(scores, logprobs, rtol=1e-6, atol=1e-6)
    # The highest draw there is meets the last mass or one just before it, never a token that has none.
    highest = torch.full((rows,), 1 - 2**-24)
    assert operations.sample(logits, temperature, highest)[1].isfinite().all()


@needs_kernels
@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.9, 0), (1.0, 40), (0.5, 7), (0.99, 900), (1.0, 1), (1e-6, 0), (1.0, 0)]
)
@pytest.mark.parametrize("scale", [0.05, 3.0, 40.0])
def test_kept_tokens(top_p: float, top_k: int, scale: float) -> None:
    """Against rows that are sorted whole, in fp64."""
    logits = (scale * draw(6, 1003)).round(decimals=2)  # some are equal
    logits[1, ::7] = -torch.inf
    shares, counts = torch.full((6,), top_p), torch.full((6,), top_k)
    expected = kept_mask(logits.double(), shares.double(), counts)
    assert torch.equal(operations.kept_mask(logits, shares, counts), expected)


@needs_kernels
def test_kept_tokens_of_rows_with_settings_of_their_own() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log().repeat(5, 1)
    kept = operations.kept_mask(logits, torch.tensor([1.0, 0.65, 1.0, 0.55, 0.0]), torch.tensor([0, 0, 3, 2, 0]))
    rows = [row.nonzero().flatten().tolist() for row in kept]
    assert rows == [[0, 1, 2, 3], [1, 2], [1, 2, 3], [1], [1]]
    flat = operations.kept_mask(torch.zeros(2, 5000), torch.tensor([1.0, 0.01]), torch.tensor([7, 0]))
    assert flat[0].nonzero().flatten().tolist() == list(range(7))
    assert flat[1].nonzero().flatten().tolist() == list(range(50))


@needs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite(value: float) -> None:
    logits = draw(3, 100)
    logits[1] = value
    columns = SamplingColumns(torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.int64), plain=True, cuts=False)
    with torch.no_grad(), kernels_in_use(), pytest.raises(DivergenceError, match="not finite"):
        sample(logits, columns, torch.full((3,), 0.5))


@needs_kernels
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_one_logit_that_is_no_number_is_not_cut_out_of_a_long_row(top_p: float) -> None:
    logits = draw(2, 2**14)
    logits[1, 7] = torch.nan
    columns = SamplingColumns(torch.ones(2), torch.full((2,), top_p), torch.tensor([50, 50]), plain=True, cuts=True)
    with pytest.raises(DivergenceError, match="not finite"):
        sample(logits, columns, torch.full((2,), 0.5))
    kept = operations.kept_mask(logits, columns.top_p_B, columns.top_k_B)
    assert int(kept[0].sum()) <= 50  # the other row as ever
    assert kept[1].all()


@needs_kernels
def test_exponentials_over_the_whole_range() -> None:
    """Through the weights of two logits: 1 / (1 + e^-d) in log, whose error is that of e^-d."""
    gaps = torch.linspace(0, 100, 4001)
    logits = torch.stack([torch.zeros_like(gaps), -gaps], 1)
    _, logprobs, finite = operations.sample(logits, torch.ones(4001), torch.zeros(4001))
    assert finite
    torch.testing.assert_close(logprobs, -torch.exp(-gaps.double()).log1p().float(), rtol=1e-6, atol=1e-7)


def _linear(dtype: torch.dtype) -> list[Tensor]:
    shapes = [(1, 2, 5), (14, 8, 32), (15, 6, 33), (300, 100, 70)]
    x, weights = (
        [draw(n, d, dtype=dtype) for n, d, _ in shapes],
        [draw(f, d, dtype=dtype) / d**0.5 for _, d, f in shapes],
    )
    packed = [packing.packed_panels(weight.t().unsqueeze(0)) for weight in weights]
    biases = [None, *(draw(f, dtype=dtype) for _, _, f in shapes[1:])]
    return [operations.linear(*one) for one in zip(x, packed, [f for _, _, f in shapes], biases, strict=True)]


def _groups(dtype: torch.dtype) -> list[Tensor]:
    x, packed = draw(77, 24, dtype=dtype), packing.packed_panels(draw(3, 24, 70, dtype=dtype) / 5)
    return [operations.linear_by_group(x, packed, 70, counts) for counts in ([3, 0, 74], [70, 5, 2])]


def _swiglu(dtype: torch.dtype) -> list[Tensor]:
    packed = [packing.packed_gate_up(draw(1, 24, 2 * width, dtype=dtype) / 5) for width in (16, 20)]
    return [
        operations.swiglu_linear(draw(29, 24, dtype=dtype), one, w) for one, w in zip(packed, (16, 20), strict=True)
    ]


def _experts(dtype: torch.dtype) -> list[Tensor]:
    x, chosen = draw(40, 36, dtype=dtype), draw(40, 5).topk(2).indices
    gate_up, down = draw(5, 36, 40, dtype=dtype) / 6, draw(5, 20, 36, dtype=dtype) / 5
    weights = (packing.packed_gate_up(gate_up), packing.packed_down(down))
    biases = (draw(5, 40, dtype=dtype), draw(5, 36, dtype=dtype))
    return [
        operations.experts(x, chosen, draw(40, 2).sigmoid(), *weights, *some, limit, 20)
        for some, limit in (((None, None), 0.0), (biases, 1.0))
    ]


def _routes(dtype: torch.dtype) -> list[Tensor]:
    x, packed = draw(20, 64, dtype=dtype), packing.packed_panels(draw(1, 64, 20) / 8)
    rules = ((None, False, False, 1.0), (draw(20), True, True, 2.5))
    return [
        part
        for bias, *rule in rules
        for part in operations.route(x, packed, bias, draw(20) / 10, *rule, 3)  # type: ignore[arg-type]
    ]


def _norms(dtype: torch.dtype) -> list[Tensor]:
    out = []
    for width in (4, 34, 64):
        qkv, angles, weight = draw(9, 7, width, dtype=dtype), draw(9, 1, width // 2), draw(width, dtype=dtype)
        out.append(operations.rms_norm(qkv, weight, 1e-5))
        operations.norm_and_turn_(qkv, (weight, weight, 1e-6), angles.cos(), angles.sin(), 4, 2)
        out.append(qkv)
    return out


def _attention(dtype: torch.dtype) -> list[Tensor]:
    out = []
    for cache in SHAPES.values():
        cache, rows = cache.of(dtype), [row for row, length in enumerate(cache.lengths) if length]
        places = (cache.table_BM[rows].long(), (cache.lengths_B[rows] - 1).long())
        out.append(operations.attention(cache.layer, cache.q_BHC[rows], cache.keys_NJPC, cache.values_NJPU, *places))
    return out


def _samples(dtype: torch.dtype) -> list[Tensor]:
    rows = torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(50)
    uniforms = torch.rand(200, generator=torch.Generator().manual_seed(1))
    return [part for v in (3, 65, 1000) for part in operations.sample(3 * draw(200, v), rows, uniforms)[:2]]


def _many_queries(dtype: torch.dtype) -> list[Tensor]:
    q, k, v = (draw(*shape, dtype=dtype).transpose(0, 1) for shape in ((60, 4, 24), (200, 2, 24), (200, 2, 20)))
    return [operations.causal_attention(AttentionLayer(0, 0.2, window), q, k, v) for window in (0, 40)]


def _head(dtype: torch.dtype) -> list[Tensor]:
    """In fp32 alone, whatever the dtype."""
    x_ND, weight_VD, targets_N = draw(300, 19), 0.2 * draw(700, 19), torch.arange(300)
    forward = operations.head_forward(x_ND, weight_VD, targets_N, 0.7)
    largest_N, upstream_N = forward[2], draw(300)
    by_token = (largest_N, 0.1 * upstream_N, 0.01 * upstream_N, -upstream_N)
    backward = operations.head_backward(x_ND, weight_VD, targets_N, 0.7, *by_token, True, True)
    return [*forward, *(each for each in backward if each is not None)]


@needs_kernels
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width"),
    [(1, 1, 2), (33, 111, 32), (130, 225, 38), (1283, 113, 18)],
    ids=["one", "a row short", "an odd last row", "in two calls"],
)
def test_the_head_s_gradients_in_bf16_are_products_of_rounded_ones(tokens: int, vocabulary: int, width: int) -> None:
    """Sizes fill neither panels, blocks nor chunks, and odd numbers of rows have a pair's half too many."""
    if not operations.multiplies_bf16():
        pytest.skip("this machine multiplies no pairs of bf16")
    x_ND, weight_VD = (draw(rows, width, dtype=torch.bfloat16) for rows in (tokens, vocabulary))
    targets_N, factor_N, onehot_N = torch.arange(tokens) % vocabulary, draw(tokens), draw(tokens, seed=1)
    largest_N = operations.head_forward(x_ND, weight_VD, targets_N, 0.7)[2]
    by_token = (largest_N, factor_N, 0.1 * onehot_N, onehot_N)
    given = (x_ND, weight_VD, targets_N, 0.7, *by_token)
    shifted_NV = x_ND.double() @ weight_VD.double().T / 0.7 - largest_N[:, None]
    grads_NV = shifted_NV.exp() * (factor_N[:, None] + 0.1 * onehot_N[:, None] * shifted_NV)
    grads_NV[torch.arange(tokens), targets_N] += onehot_N
    rounded_NV = grads_NV.bfloat16().double()
    expected = rounded_NV @ weight_VD.double(), rounded_NV.T @ x_ND.double()
    both, alone = (
        operations.head_backward(*given, True, True),
        (
            operations.head_backward(*given, True, False)[0],
            operations.head_backward(*given, False, True)[1],
        ),
    )
    for found, same, right in zip(both, alone, expected, strict=True):
        assert found is not None
        assert same is not None
        assert torch.equal(found, same)
        # The last rounding, and a few gradients of logits that lie at a tie.
        torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=2**-10 * float(right.abs().max()))


@needs_kernels
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this machine has no AVX-512")
@pytest.mark.parametrize("instructions", ["AVX2", pytest.param("DEFAULT", marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kernel", [_linear, _groups, _swiglu, _experts, _routes, _norms, _attention, _samples, _head, _many_queries]
)
def test_older_processors_compute_the_same(
    kernel: Callable[[torch.dtype], list[Tensor]],
    dtype: torch.dtype,
    instructions: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AVX2 gives the bits of AVX-512 in fp32. Processors without AVX2 round a product before they add it, and bf16 is multiplied
    in pairs only where there is an instruction for it."""
    ours, compiled = kernel(dtype), library.library(instructions)
    monkeypatch.setattr(library, "library", lambda: compiled)
    for found, expected in zip(kernel(dtype), ours, strict=True):
        if instructions == "AVX2" and dtype == torch.float32:
            assert torch.equal(found, expected)
        elif found.is_floating_point():
            tolerance = TOLERANCE[found.dtype]
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(found, expected)


def test_where_nothing_can_be_compiled_all_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library.library.cache_clear()
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    try:
        with pytest.warns(UserWarning, match=r"could not be compiled .*no-compiler.*; install g\+\+"):
            assert library.library() is None
        engine = LLMEngine(tiny_family("qwen3_moe"), 2)
        group = engine.add(Request((1, 2), 2, Sampling(5), "r"))
        while not engine.idle:
            engine.step()
        assert [len(sample.token_ids) for sample in group.samples if sample] == [5, 5]
    finally:
        library.library.cache_clear()


@pytest.fixture
def compiler_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands run in place of a compiler, which writes a file of some bytes into an empty cache."""
    runs: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        runs.append(command)
        if "-o" in command:
            Path(command[-1]).write_bytes(bytes(100))
        return subprocess.CompletedProcess(command, 0, "g++ 1.0", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return runs


def test_a_line_says_so_before_it_compiles(
    compiler_runs: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said_before = subprocess.run, list[str]()

    def watched(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "-o" in command:
            said_before.append(capsys.readouterr().err)
        return run(command, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "run", watched)
    for _ in range(2):
        library._compiled(["g++"], "AVX512")
    assert said_before == ["compiling the C++ kernels, once on this machine: less than a minute\n"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("vocabulary", "numerics"), [(64, "fast"), (64, "exact"), (8192, "fast")])
def test_what_needs_the_kernels_has_them_compiled_as_it_is_made(
    vocabulary: int, numerics: Literal["fast", "exact"], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    model = new_model(ModelConfig(**DENSE | {"vocab_size": vocabulary}), torch.float32, "cpu").set_numerics(numerics)
    monkeypatch.setattr(library, "library", lambda: asked.append(True))
    Learner(model, OptimizerSection(learning_rate=1e-3), total_steps=1, tokens_per_microbatch=64)
    assert asked, "for attention, whatever the vocabulary"
    asked.clear()
    LLMEngine(model, max_sequences=2)
    assert asked


@needs_kernels
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [15, 16])
def test_tiles_multiply_many_rows_of_bf16(
    tiles: bool, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernels: list[str] = []
    for name in ("linear", "swiglu_linear"):
        kernel = getattr(operations, name)
        monkeypatch.setattr(
            operations, name, lambda *a, name=name, kernel=kernel: by_kernels.append(name) or kernel(*a)
        )
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    x_ND = draw(rows, 64, dtype=dtype)
    weight_FD, gate_up_FD = (nn.Parameter(draw(outputs, 64, dtype=dtype) / 8) for outputs in (48, 96))
    with in_use():
        out_NF, inner_NF = ops_for(x_ND).linear(x_ND, weight_FD), ops_for(x_ND).swiglu_linear(x_ND, gate_up_FD)
    torches = tiles and dtype == torch.bfloat16 and rows == 16
    assert by_kernels == ([] if torches else ["linear", "swiglu_linear"])
    with torch.no_grad():
        close(out_NF, OPS.linear(x_ND, weight_FD))
        close(inner_NF, OPS.swiglu_linear(x_ND, gate_up_FD))


@needs_kernels
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(("width", "tokens"), [(1024, 31), (1024, 32), (1000, 32)])
def test_tiles_multiply_large_experts_with_many_rows(
    tiles: bool, width: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 rows for each of four experts of 256 x 1024 are the least that pay for the calls."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    gate_up_EDF = nn.Parameter(draw(4, 256, 2 * width, dtype=torch.bfloat16))
    down_EFD = nn.Parameter(draw(4, width, 256, dtype=torch.bfloat16))
    x_TD = draw(tokens, 256, dtype=torch.bfloat16)
    chosen_TK = torch.arange(2 * tokens).view(tokens, 2) % 4
    weights_TK = torch.full(chosen_TK.shape, 0.5)
    with in_use():
        found = ops_for(x_TD).experts(x_TD, chosen_TK, weights_TK, gate_up_EDF, down_EFD, None, None, 0.0)
    assert (found is None) == (tiles and width == 1024 and tokens == 32)


@needs_kernels
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("rows", [60, 64])
def test_experts_with_many_rows_are_not_packed_for_tiles(
    tiles: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are held by the engine twice, as they are and in the kernels' panels."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    x_RD, weight_EDF = draw(rows, 64, dtype=torch.bfloat16), nn.Parameter(draw(4, 64, 48, dtype=torch.bfloat16))
    counts, cache = [rows - 30, 0, 20, 10], packing.PackedWeights()
    with cache.active(), packing.kernels_in_use(), torch.no_grad():
        out_RF = ops_for(x_RD).linear_by_group(x_RD, weight_EDF, counts)
    assert len(cache._packed) == int(packing.ONEDNN_BF16 and not (tiles and rows == 64))
    close(out_RF, OPS.linear_by_group(x_RD, weight_EDF, counts))


def test_compiled_once_per_cache(compiler_runs: list[list[str]], tmp_path: Path) -> None:
    first = library._compiled(["g++"], "AVX512")
    assert first.parent == tmp_path / "nmoe" / "kernels"
    assert first.name.startswith("avx512-")
    assert library._compiled(["g++"], "AVX512") == first
    assert library._compiled(["g++"], "AVX2").name.startswith("avx2-")
    assert [command[1] for command in compiler_runs] == ["--version", "-O3", "--version", "--version", "-O3"]
    assert ["-march=native" in command for command in compiler_runs if "-o" in command] == [True, False]
    assert "-march=x86-64-v3" in compiler_runs[-1]


def test_another_processor_compiles_anew(compiler_runs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    first = library._compiled(["g++"], "AVX512")
    monkeypatch.setattr(library, "cpu_features", lambda: {"avx512f", "amx_bf16"})
    assert library._compiled(["g++"], "AVX512") != first


@pytest.mark.parametrize("left", [0, 16, 50, 131])
def test_a_torn_library_is_compiled_anew(compiler_runs: list[list[str]], left: int) -> None:
    path = library._compiled(["g++"], "AVX512")
    whole = path.read_bytes()
    assert len(whole) == 100 + 32
    path.write_bytes(whole[:left])
    assert library._compiled(["g++"], "AVX512") == path
    assert path.read_bytes() == whole
    assert [command[1] for command in compiler_runs].count("-O3") == 2


def test_what_a_killed_compiler_left_is_removed(compiler_runs: list[list[str]], tmp_path: Path) -> None:
    cache = tmp_path / "nmoe" / "kernels"
    for name, age_s in (("compiling-old", 3600), ("compiling-now", 0)):
        (cache / name).mkdir(parents=True)
        (cache / name / "half.so").write_bytes(b"half")
        os.utime(cache / name, (time.time() - age_s,) * 2)
    path = library._compiled(["g++"], "AVX512")
    assert {found.name for found in cache.iterdir()} == {"compiling-now", path.name}


def test_a_compiler_may_be_a_command_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `CXX="ccache g++"`."""
    seen: list[list[str]] = []

    def compiled(compiler: list[str], _: str) -> Path:
        seen.append(compiler)
        raise OSError("not now")

    monkeypatch.setattr(library, "_compiled", compiled)
    library.library.cache_clear()
    try:
        for value in ("ccache g++", "'/opt/my tools/g++' -m64", ""):
            monkeypatch.setenv("CXX", value)
            with pytest.warns(UserWarning, match="not now"):
                assert library.library() is None
            library.library.cache_clear()
    finally:
        library.library.cache_clear()
    assert seen == [["ccache", "g++"], ["/opt/my tools/g++", "-m64"], ["g++"]]


@needs_kernels
def test_what_the_engine_uses_them_for(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    call = library.call

    def noting(name: str, *arguments: Tensor | int | float | None) -> int:
        called.add(name)
        return call(name, *arguments)

    monkeypatch.setattr(operations, "call", noting)
    exact = {"nmoe_linear_fp32", "nmoe_linear_by_group_fp32", "nmoe_attention_fp32"}
    kinds = ("linear", "route", "experts", "rms_norm", "norm_and_turn", "attention", "packed_attention")
    expected = {"exact": exact, "fast": {*(f"nmoe_{kind}_fp32" for kind in kinds), "nmoe_sample"}}
    for numerics in ("exact", "fast"):
        model = tiny_family("qwen3_moe").set_numerics(numerics)  # type: ignore[arg-type]
        called.clear()
        engine = LLMEngine(model, 2)
        engine.add(Request((1, 2), 2, Sampling(3), "r"))
        while not engine.idle:
            engine.step()
        assert called == expected[numerics]


@needs_kernels
def test_a_weight_that_changes_is_packed_anew() -> None:
    weight, x = nn.Parameter(draw(5, 4)), draw(3, 4)
    with in_use():
        for _ in range(2):
            assert torch.equal(ops_for(x).linear(x, weight), operations.linear(x, panels(weight)[0], 5, None))
            close(ops_for(x).linear(x, weight), F.linear(x, weight))
            weight.mul_(2)
