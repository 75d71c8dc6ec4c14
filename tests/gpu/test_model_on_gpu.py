"""What only a CUDA device can show of the model: the kernels compiled for it, torch's own there, and no waiting for it.

Left out unless asked for (`scripts/gpu_check.sh`). References are computed on the CPU in fp64 or by the plain path in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from paged_cases import SHAPES, Cache
from tiny_models import MOE
from torch import Tensor

from nmoe.model.config import ModelConfig
from nmoe.model.device import fetch, put
from nmoe.model.layers import RMSNorm
from nmoe.model.moe import MoE, RouterTrace
from nmoe.model.ops.attention import AttentionLayer, causal_attention, paged_attention
from nmoe.model.ops.table import ops_for
from nmoe.model.ops.triton.ops import TritonOps
from nmoe.model.packed import PackedAttention, _BucketedAttention
from nmoe.model.transformer import Transformer

pytestmark = pytest.mark.gpu

KERNELS = TritonOps()

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def a_device() -> Iterator[None]:
    assert torch.cuda.is_available(), "asked for with -m gpu on a machine without CUDA"
    yield
    torch.cuda.set_sync_debug_mode("default")


def relative_error(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None
    assert theirs is not None
    return ((ours.double().cpu() - theirs.double().cpu()).norm() / theirs.double().cpu().norm()).item()


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def on_gpu(arguments: tuple[AttentionLayer | Tensor, ...]) -> list[AttentionLayer | Tensor]:
    layer = arguments[0]
    assert isinstance(layer, AttentionLayer)
    sinks = None if layer.sinks_H is None else layer.sinks_H.cuda()
    moved = AttentionLayer(layer.index, layer.scale, layer.window, sinks)
    return [moved, *(x.cuda() for x in arguments[1:] if isinstance(x, Tensor))]


LARGE = {
    "qwen3": Cache([1, 513, 640, 2000], 16, 8, 128, 128),
    "gpt-oss": Cache([100, 1500], 64, 8, 64, 64, window=128, sinks=True),
    "gpt-oss, whole": Cache([100, 1500], 64, 8, 64, 64, sinks=True),
    "deepseek": Cache([33, 700], 16, 16, 192, 128),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cache", [*SHAPES.values(), *LARGE.values()], ids=[*SHAPES, *LARGE])
def test_paged_attention(cache: Cache, dtype: torch.dtype) -> None:
    arguments = cache.of(dtype).arguments()
    layer, *tensors = arguments
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in tensors]
    expected = paged_attention(layer, *wide)
    out = KERNELS.paged_attention(*on_gpu(arguments))
    assert out.dtype == dtype
    assert not out.isnan().any()
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(sinks: bool) -> None:
    cache = Cache([300, 5, 1300, 512, 513], 16, 8, 128, 128, sinks=sinks).of(torch.bfloat16)
    together = KERNELS.paged_attention(*on_gpu(cache.arguments()))
    for row, length in enumerate(cache.lengths):
        alone = KERNELS.paged_attention(*on_gpu(cache.arguments(slice(row, row + 1), -(-length // 16))))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pointwise_kernels_and_their_gradients(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    row_TK = torch.randperm(4096, generator=generator).view(512, 8)
    token_R = row_TK.flatten().argsort().div(8, rounding_mode="floor")
    angle = torch.randn(512, 1, 64, generator=generator)

    def turned(x: Tensor) -> Tensor:
        table = torch.float64 if x.dtype == torch.float64 else torch.float32
        return ops_for(x).rotate(x, angle.cos().to(x.device, table), angle.sin().to(x.device, table))

    cases = {
        "swiglu": (lambda x: ops_for(x).swiglu(x), (512, 1536)),
        "clamped": (lambda x: ops_for(x).swiglu(x, 1.5), (512, 1536)),
        "dispatch": (lambda x: ops_for(x).dispatch(x, token_R.to(x.device), row_TK.to(x.device)), (512, 768)),
        "rotary": (turned, (512, 24, 128)),
        "norm": (lambda x: RMSNorm(768, 1e-6).to(x)(x), (512, 768)),
    }
    for name, (function, shape) in cases.items():
        x = torch.randn(shape, generator=generator).to(dtype)
        ours, theirs = leaf(x.cuda()), leaf(x.double())
        out, expected = function(ours), function(theirs)
        upstream = torch.randn(expected.shape, generator=generator).to(dtype)
        out.backward(upstream.cuda())
        expected.backward(upstream.double())
        assert relative_error(out, expected) < TOLERANCE[dtype], name
        assert relative_error(ours.grad, theirs.grad) < TOLERANCE[dtype], name
    y, weights = torch.randn(4096, 768, generator=generator).to(dtype), torch.rand(512, 8, generator=generator)
    upstream = torch.randn(512, 768, generator=generator).to(dtype)
    results = []
    for convert in (lambda t: t.cuda(), lambda t: t.double()):
        leaves = [leaf(convert(t)) for t in (y, weights)]
        out = ops_for(leaves[0]).combine(*leaves, row_TK.to(leaves[0].device))
        out.backward(convert(upstream))
        results.append([out, *(x.grad for x in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("widths", [(128, 128), (80, 80), (192, 128), (20, 20)], ids=str)
@pytest.mark.parametrize("window", [0, 1, 128])
def test_variable_length_attention_equals_the_buckets(window: int, widths: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(window)
    lengths = [300, 1, 0, 65, 200, 199]
    kv_heads = 2 if widths[0] == widths[1] else 4
    shapes = [(sum(lengths), n, w) for n, w in ((4, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))]
    qkv = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    upstream = torch.randn(sum(lengths), 4, widths[1], generator=generator).bfloat16()
    layer = AttentionLayer(0, widths[0] ** -0.5, window)
    results = []
    for attend, convert in (
        (PackedAttention(lengths, torch.device("cuda")), lambda t: t.cuda()),
        (_BucketedAttention(lengths, torch.device("cpu"), None, exact=False), lambda t: t.double()),
    ):
        leaves = [leaf(convert(x)) for x in qkv]
        out = attend(layer, *leaves)
        out.backward(convert(upstream))
        results.append([out, *(x.grad for x in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1.5e-2


def moe_layer(**changes: int) -> MoE:
    shape = {"experts": 16, "experts_per_token": 4, "expert_width": 96, "hidden_size": 128} | changes
    model = Transformer(ModelConfig(**(MOE | shape))).initialize(0)
    return model.moe_layers()[0]


@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_experts_in_values_and_gradients_without_a_wait(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 128, generator=generator).bfloat16()
    upstream = torch.randn(tokens, 128, generator=generator).bfloat16()
    layer = moe_layer()
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16().float()
    chosen = RouterTrace()
    with torch.no_grad():
        layer(x.float(), chosen)
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        there = layer.to(device, dtype)
        there_x = leaf(x.to(device, dtype))
        trace = RouterTrace(replay=chosen.chosen_TK[0].unsqueeze(1).to(device))
        there.zero_grad(set_to_none=True)
        upstream_there = upstream.to(device, dtype)
        if device == "cuda":
            there(there_x.detach(), trace)  # kernels are compiled
            trace = RouterTrace(replay=trace.replay)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        out = there(there_x, trace)
        out.backward(upstream_there)
        torch.cuda.set_sync_debug_mode("default")
        results.append([out.detach().cpu(), there_x.grad.cpu(), *(p.grad.cpu().clone() for p in there.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 3e-2


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_behind_a_prefix_holds_no_score_per_pair(window: int, sinks: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    earlier, length = 8192, 2048
    layer = AttentionLayer(0, 0.1, window, draw(32) if sinks else None)
    q, k, v = draw(1, 32, length, 128), draw(1, 4, earlier + length, 128), draw(1, 4, earlier + length, 128)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = KERNELS.causal_attention(layer, q, k, v, earlier)
    held = torch.cuda.max_memory_allocated() - before
    assert held < 32 * length * (earlier + length)  # a byte for each; the scores in fp32 would be four
    # The last queries, by all keys and in fp32.
    few = AttentionLayer(0, 0.1, window, None if layer.sinks_H is None else layer.sinks_H.float())
    rows = q[:, :, -64:].float(), k.float(), v.float()
    expected = causal_attention(few, *rows, earlier + length - 64)
    assert relative_error(out[:, :, -64:], expected) < 1e-2


def test_a_copy_to_the_device_makes_nobody_wait() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_sync_debug_mode("error")
    there = put(torch.arange(1000), device)
    torch.cuda.set_sync_debug_mode("default")
    assert fetch(there, there + 1)[1].tolist() == list(range(1, 1001))
