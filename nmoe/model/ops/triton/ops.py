"""The table of operations on CUDA: Triton kernels, computed in fp32 and rounded once, and torch's own."""

# Shapes: see `nmoe.model.ops.torch`.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.ops.attention import AttentionLayer, attention_in_blocks
from nmoe.model.ops.exact.ops import OrderFreeSums
from nmoe.model.ops.torch import TorchOps

_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonOps(TorchOps):
    """Operations on CUDA in fp32 and below. None of them makes the host wait for the device."""

    def head_weight(self, weight_VD: Tensor) -> Tensor:
        return weight_VD

    def logits(self, x_ND: Tensor, head_weight: Tensor, vocabulary: int) -> Tensor:
        return torch.mm(x_ND, head_weight.t(), out_dtype=torch.float32)

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        if weight_D.dim() == 1:
            return F.rms_norm(x_ND, weight_D.shape, weight_D, eps)
        return F.rms_norm(x_ND, x_ND.shape[-1:], None, eps) * weight_D

    def turn(self, x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        from nmoe.model.ops.triton.elementwise import rotate_triton

        return rotate_triton(x_TNC, cos_T1c, sin_T1c)

    def swiglu(self, gate_up_NF: Tensor, limit: float = 0.0) -> Tensor:
        out: Tensor = _SwiGLU.apply(gate_up_NF, limit)
        return out

    def sum_rows(self, y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
        from nmoe.model.ops.triton.routing import sum_rows

        return sum_rows(y_RD, weights_TK, row_TK)

    def spread_rows(self, grad_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:
        from nmoe.model.ops.triton.routing import spread_rows

        return spread_rows(grad_TD, y_RD, weights_TK, row_TK)

    def causal_attention(
        self, layer: AttentionLayer, q_BHLC: Tensor, k_BJSC: Tensor, v_BJSU: Tensor, earlier: int = 0
    ) -> Tensor:
        return attention_in_blocks(layer, q_BHLC, k_BJSC, v_BJSU, earlier)

    def paged_attention(
        self,
        layer: AttentionLayer,
        q_BHC: Tensor,
        keys_NJPC: Tensor,
        values_NJPU: Tensor,
        table_BM: Tensor,
        lengths_B: Tensor,
    ) -> Tensor:
        """Computes `TorchOps.paged_attention` without gathering: reads the cache's blocks where they are. Table entries past a
        row's length are never followed, and the kernel's grid is laid out for rows of M blocks. A cache in another dtype than fp32,
        bf16 and fp16 is gathered."""
        if keys_NJPC.dtype not in _CACHE_DTYPES:
            return super().paged_attention(layer, q_BHC, keys_NJPC, values_NJPU, table_BM, lengths_B)
        from nmoe.model.ops.triton.paged_attention import paged_attention_triton

        return paged_attention_triton(layer, q_BHC, keys_NJPC, values_NJPU, table_BM, lengths_B)


class OrderFreeTritonOps(OrderFreeSums, TritonOps):
    """Operations with exact numerics on CUDA."""


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_NF: Tensor, limit: float) -> Tensor:
        from nmoe.model.ops.triton.elementwise import swiglu_forward

        ctx.save_for_backward(gate_up_NF)
        ctx.limit = limit
        return swiglu_forward(gate_up_NF, limit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from nmoe.model.ops.triton.elementwise import swiglu_backward

        (gate_up_NF,) = ctx.saved_tensors
        return swiglu_backward(grads[0], gate_up_NF, ctx.limit), None
