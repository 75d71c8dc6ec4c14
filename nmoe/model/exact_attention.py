"""Causal attention that gives a query the same bits in any batch: in training, in prefill and in decoding. It uses the kernel
of decoding, which takes a query's keys in order, in blocks that start at position 0. Where the kernel cannot run, it uses sums
that no order changes (`nmoe.model.ops.exact.attention`).
"""

# Shapes: T packed tokens, S sequences, M blocks of the longest, H query heads, J key-value heads, C key width, U value width.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nmoe.model.attention import Attend
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.ops.table import ops_for

_BLOCK = 16  # positions, of attention.cpp


class ExactAttention:
    """An `Attend` over sequences laid end to end; `lengths` gives their lengths in that order. `order_free` is used where the
    kernel cannot run. Gradients are those of `differentiable`, the same attention by torch's operations; their bits may depend
    on the batch."""

    def __init__(self, lengths: Sequence[int], order_free: Attend, differentiable: Attend) -> None:
        self.order_free, self.differentiable = order_free, differentiable
        lengths_S = torch.tensor(lengths, dtype=torch.int64)
        blocks_S = (lengths_S + _BLOCK - 1).div(_BLOCK, rounding_mode="floor")
        first_S = blocks_S.cumsum(0) - blocks_S
        self.blocks = int(blocks_S.sum())
        self.sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_S)
        self.positions_T = torch.arange(len(self.sequence_T)) - (lengths_S.cumsum(0) - lengths_S)[self.sequence_T]
        self.places_T = first_S[self.sequence_T] * _BLOCK + self.positions_T
        # Entries past a sequence's blocks are never read.
        self.table_SM = first_S.unsqueeze(1) + torch.arange(max(blocks_S.tolist(), default=0))

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.attend(layer, q_THC, k_TJC, v_TJU)
        out_THU: Tensor = _Exact.apply(q_THC, k_TJC, v_TJU, layer.sinks_H, layer, self)
        return out_THU

    def attend(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        ops = ops_for(q_THC, exact=True)
        if not ops.attends_in_blocks:
            return self.order_free(layer, q_THC, k_TJC, v_TJU)
        return ops.attend_in_blocks(
            layer,
            q_THC,
            self._in_blocks(k_TJC),
            self._in_blocks(v_TJU),
            self.table_SM,
            self.positions_T,
            self.sequence_T,
        )

    def _in_blocks(self, x_TJW: Tensor) -> Tensor:
        """`[blocks, J, 16, W]`."""
        rows = x_TJW.new_zeros(self.blocks * _BLOCK, *x_TJW.shape[1:]).index_copy_(0, self.places_T, x_TJW)
        return rows.unflatten(0, (self.blocks, _BLOCK)).transpose(1, 2).contiguous()


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THC: Tensor,
        k_TJC: Tensor,
        v_TJU: Tensor,
        sinks_H: Tensor | None,
        layer: AttentionLayer,
        attention: ExactAttention,
    ) -> Tensor:
        ctx.save_for_backward(q_THC, k_TJC, v_TJU, sinks_H)
        ctx.layer, ctx.attention = layer, attention
        return attention.attend(layer, q_THC, k_TJC, v_TJU)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
            q_THC, k_TJC, v_TJU, sinks_H = inputs
            out_THU = ctx.attention.differentiable(replace(ctx.layer, sinks_H=sinks_H), q_THC, k_TJC, v_TJU)
            found = torch.autograd.grad(out_THU, [x for x in inputs if x is not None], grads[0])
        return *found, *([None] * (6 - len(found)))
