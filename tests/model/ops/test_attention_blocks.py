"""Attention in blocks of queries, as accelerators run what needs a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.ops import attention
from nmoe.model.ops.attention import AttentionLayer, attention_in_blocks, causal_attention

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
    monkeypatch.setattr(attention, "BLOCK_QUERIES", block)
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
    monkeypatch.setattr(attention, "BLOCK_QUERIES", 16)
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
