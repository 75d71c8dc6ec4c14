"""The tables of operations on a CPU with fast numerics.

torch gives fp32 products to MKL, which on CPUs other than Intel's takes a path of half the width: 3072 x 1024 by 1024 x 256 runs
at 195 GFLOP/s there and at 410 through oneDNN (two Zen 5 cores, torch 2.13). With oneDNN a row's bits do not depend on how many
rows there are, from two rows on; MKL asks for eight rows to each thread.
"""

# Shapes: see `nmoe.model.ops.torch`.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe.model.ops.attention import AttentionLayer, Clusters
from nmoe.model.ops.cpu import library, operations, packing
from nmoe.model.ops.cpu.packing import can_pack, can_pack_for_onednn, packed
from nmoe.model.ops.torch import Norms, TorchOps

# oneDNN makes a program for every new shape, for about a millisecond each, and in training every expert has another number of rows
# at every step. Forward and backward of 4032 rows over 8 experts: 18.7 against 8.0 ms by MKL's groups at width 128 and expert
# width 128, 35.6 against 28.7 at 256 and 256, 48.3 against 55.9 at 512 and 256 (two Zen 5 cores).
_OWN_SHAPE_PRODUCT = 2**27

# Sorting a row of 151,936 logits takes 15 ms. Shorter rows are sorted, which the torch definition does everywhere.
_LONG_ROW = 2**14

# Attention of 2048 positions, 8 heads of 128, one Zen 4 core: torch 70 GFLOP/s in fp32 and 66 in bf16, the kernel 86 and 149.
# Shorter sequences spend little on it.
_LONG_SEQUENCE = 1024


# Rows from which oneDNN's products of bf16 by AMX are faster than the kernels, which multiply in vectors. 576 to 1536 on one core
# of a Sapphire Rapids, GFLOP/s of the kernels and of oneDNN: 26 and 13 with one row, 75 and 166 with 16, 27 and 113 with 128,
# 26 and 193 with 512.
_AMX_ROWS = 16

# Rows of an expert times its two widths from which its products by AMX pay for the calls. Two of four experts of 576 x 1536 on one
# core of a Sapphire Rapids, milliseconds by the kernel and by AMX: 2.8 and 5.0 with 8 rows for each expert, 4.9 and 4.5 with 16,
# 18.1 and 7.2 with 64, 71 and 15 with 256; two of eight of 256 x 128: 0.9 and 1.8 with 32, 3.0 and 2.4 with 128.
_AMX_EXPERT = 2**22


class CpuOps(TorchOps):
    """Operations on a CPU, with gradients: torch's, but fp32 products by oneDNN, and C++ kernels for packed attention, the head
    over a wide vocabulary, and top-k and top-p."""

    def linear(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        if can_pack_for_onednn(x_ND, weight_FD):
            return _by_onednn(x_ND, packed(weight_FD, packing.for_onednn)[0], bias_F, weight_FD.shape[0])
        if not by_onednn(x_ND):
            return F.linear(x_ND, weight_FD, bias_F)
        if not torch.is_grad_enabled():
            return self.product(x_ND, weight_FD, bias_F)
        out_NF: Tensor = Linear.apply(self, x_ND, weight_FD, bias_F)
        return out_NF

    def product(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        return _by_onednn(x_ND, weight_FD, bias_F, weight_FD.shape[0])

    def input_gradient(self, grad_NF: Tensor, weight_FD: Tensor) -> Tensor:
        if not by_onednn(grad_NF):
            return super().input_gradient(grad_NF, weight_FD)
        return _by_onednn(grad_NF, weight_FD.t(), None, weight_FD.shape[1])

    def weight_gradient(self, x_ND: Tensor, grad_NF: Tensor) -> Tensor:
        if not by_onednn(x_ND):
            return super().weight_gradient(x_ND, grad_NF)
        # With the longer side as columns: a tall result of a long sum takes up to four times as long.
        if grad_NF.shape[1] > x_ND.shape[1]:
            return _by_onednn(x_ND.t(), grad_NF.t(), None, grad_NF.shape[1]).t()
        return _by_onednn(grad_NF.t(), x_ND.t(), None, x_ND.shape[1])

    def linear_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
        # Experts with many rows would be held a third time, beside the kernels' panels: 0.6 GB for four experts of SmolLM2-135M.
        # Unpacked, their products cost 1.2 to 1.6 times as much (64 and 128 rows, one core of a Sapphire Rapids).
        many = _by_amx(x_RD, len(x_RD) // len(weight_EDF))
        if can_pack_for_onednn(x_RD, weight_EDF) and not many:
            weights, outputs = packed(weight_EDF, packing.each_for_onednn), weight_EDF.shape[2]
            parts = enumerate(x_RD.split(list(counts)))
            return torch.cat([_by_onednn(part, weights[e], None, outputs) for e, part in parts])
        if not by_onednn(x_RD):
            return super().linear_by_group(x_RD, weight_EDF, counts)
        out_RF: Tensor = LinearByGroup.apply(self, x_RD, weight_EDF, tuple(counts))
        return out_RF

    def product_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
        parts = enumerate(x_RD.split(list(counts)))
        return torch.cat([self.product(part, weight_EDF[e].t()) for e, part in parts])

    def takes_head(self, x_ND: Tensor, weight_VD: Tensor) -> bool:
        return (
            x_ND.dtype == weight_VD.dtype
            and type(weight_VD) in (Tensor, nn.Parameter)
            and weight_VD.is_contiguous()
            and library.library() is not None
            and _multiplies(x_ND)
        )

    head_forward, head_backward = staticmethod(operations.head_forward), staticmethod(operations.head_backward)

    def takes_clusters(self, layer: AttentionLayer, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, longest: int) -> bool:
        dtypes = {x.dtype for x in (q_SHC, k_SJC, v_SJU)}
        plain = layer.sinks_H is None and (not layer.window or layer.window >= longest)
        return plain and len(dtypes) == 1 and dtypes <= set(library.DTYPES) and library.library() is not None

    def attend_in_clusters(
        self, layer: AttentionLayer, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, clusters: Clusters
    ) -> Tensor:
        out_SHU: Tensor = AttentionInClusters.apply(layer, clusters, q_SHC, k_SJC, v_SJU)
        return out_SHU

    def kept_mask(self, logits_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor | None:
        if logits_BV.shape[-1] < _LONG_ROW or logits_BV.dtype != torch.float32 or library.library() is None:
            return None
        return operations.kept_mask(logits_BV, top_p_B, top_k_B)

    def loops_over_experts(self, x_RD: Tensor, longest: int, width: int, hidden: int) -> bool:
        small = longest * width * hidden < _OWN_SHAPE_PRODUCT
        return by_onednn(x_RD) and not (torch.is_grad_enabled() and small)


class KernelOps(CpuOps):
    """Operations on a CPU for decoding, without gradients: C++ kernels over packed weights."""

    attends_in_blocks = True

    def linear(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        if _by_amx(x_ND, len(x_ND)) or not _takes(x_ND, weight_FD):
            return super().linear(x_ND, weight_FD, bias_F)
        return operations.linear(x_ND, packed(weight_FD, packing.panels)[0], weight_FD.shape[0], bias_F)

    def linear_in_fp32(self, x_ND: Tensor, weight_FD: Tensor) -> Tensor:
        if x_ND.dtype == torch.bfloat16 and _takes(x_ND, weight_FD) and operations.multiplies_bf16():
            return operations.linear_in_fp32(x_ND, packed(weight_FD, packing.panels)[0], weight_FD.shape[0])
        wide_ND = x_ND.float()
        if not _takes(wide_ND, weight_FD):
            return super().linear_in_fp32(x_ND, weight_FD)
        return operations.linear(wide_ND, packed(weight_FD, packing.panels_in_fp32)[0], weight_FD.shape[0], None)

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        if weight_D.dim() > 1:
            return super().rms_norm(x_ND, weight_D, eps)
        return operations.rms_norm(x_ND, weight_D, eps)

    def norm_and_rotate(
        self, qkv_TNC: Tensor, norms: Norms | None, cos_T1c: Tensor, sin_T1c: Tensor, heads: int, kv_heads: int
    ) -> Tensor:
        operations.norm_and_turn_(qkv_TNC, norms, cos_T1c, sin_T1c, heads, kv_heads)
        return qkv_TNC[:, : heads + kv_heads]

    def swiglu_linear(self, x_ND: Tensor, gate_up_FD: Tensor) -> Tensor:
        if _by_amx(x_ND, len(x_ND)) or not _takes(x_ND, gate_up_FD):
            return super().swiglu_linear(x_ND, gate_up_FD)
        width = gate_up_FD.shape[0] // 2
        return operations.swiglu_linear(x_ND, packed(gate_up_FD, packing.gate_up_panels)[0], width)

    def route(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        balance_E: Tensor,
        sigmoid: bool,
        renormalize: bool,
        scale: float,
        chosen: int,
    ) -> tuple[Tensor, Tensor] | None:
        if not _takes(x_TD, weight_ED):
            return None
        panels, rule = packed(weight_ED, packing.panels_in_fp32)[0], (sigmoid, renormalize, scale, chosen)
        return operations.route(x_TD, panels, bias_E, balance_E.float(), *rule)

    def experts(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        gate_up_EDF: Tensor,
        down_EFD: Tensor,
        gate_up_bias_EF: Tensor | None,
        down_bias_ED: Tensor | None,
        limit: float,
    ) -> Tensor | None:
        rows = chosen_TK.numel() // gate_up_EDF.shape[0]
        by_amx = _by_amx(x_TD, rows) and rows * down_EFD[0].numel() >= _AMX_EXPERT
        if by_amx or not _takes(x_TD, gate_up_EDF, down_EFD):
            return None
        weights = packed(gate_up_EDF, packing.each_gate_up)[0], packed(down_EFD, packing.each_down)[0]
        biases, width = (gate_up_bias_EF, down_bias_ED), down_EFD.shape[1]
        return operations.experts(x_TD, chosen_TK, weights_TK, *weights, *biases, limit, width)

    def takes_clusters(self, layer: AttentionLayer, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, longest: int) -> bool:
        return longest < _LONG_SEQUENCE and super().takes_clusters(layer, q_SHC, k_SJC, v_SJU, longest)

    def causal_attention(
        self, layer: AttentionLayer, q_BHLC: Tensor, k_BJSC: Tensor, v_BJSU: Tensor, earlier: int = 0
    ) -> Tensor:
        dtypes = {x.dtype for x in (q_BHLC, k_BJSC, v_BJSU)}
        if k_BJSC.shape[2] < _LONG_SEQUENCE or len(dtypes) > 1 or not _multiplies(q_BHLC):
            return super().causal_attention(layer, q_BHLC, k_BJSC, v_BJSU, earlier)
        rows = zip(q_BHLC, k_BJSC, v_BJSU, strict=True)
        return torch.stack([operations.causal_attention(layer, *row) for row in rows])

    attend_in_blocks, sample = staticmethod(operations.attention), staticmethod(operations.sample)


def by_onednn(x: Tensor) -> bool:
    """Returns whether oneDNN computes the products of this CPU tensor."""
    # The compiler takes its own products.
    return packing.ONEDNN and x.dtype == torch.float32 and not torch.compiler.is_compiling()


def _by_onednn(x_ND: Tensor, weight: Tensor, bias_F: Tensor | None, outputs: int) -> Tensor:
    """Computes a linear layer by oneDNN. `weight` is `[F, D]` or packed."""
    if x_ND.numel() == 0:
        return x_ND.new_zeros(x_ND.shape[0], outputs)
    out_NF: Tensor = torch.ops.mkldnn._linear_pointwise(x_ND, weight, bias_F, "none", [], "")
    return out_NF


def _by_amx(x_ND: Tensor, rows: int) -> bool:
    """Returns whether torch multiplies this number of the tensor's rows in the processor's tiles, faster than the kernels."""
    return x_ND.dtype == torch.bfloat16 and rows >= _AMX_ROWS and torch.cpu._is_amx_tile_supported()


def _multiplies(x: Tensor) -> bool:
    """Returns whether the kernels multiply this tensor faster than torch: fp32, or bf16 in pairs if the processor has an
    instruction for that."""
    pairs = x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0 and operations.multiplies_bf16()
    return x.dtype == torch.float32 or pairs


def _takes(x: Tensor, *weights: Tensor) -> bool:
    """Returns whether the kernels can multiply x by these weights: the weights can be packed, and bf16 rows have even length."""
    even = x.dtype == torch.float32 or x.shape[-1] % 2 == 0  # bf16 is multiplied in pairs
    return even and all(can_pack(x, weight) for weight in weights)


class AttentionInClusters(torch.autograd.Function):
    """Causal attention of packed sequences with gradients, where the keys and values of a prefix that several sequences share are
    read once (a cluster is such a set of sequences, see `Clusters`).

    With x' the transpose of x, s = scale q k' and weights w = exp(s - log sum exp s), the output is o = w v, and the gradients are
    dv = w' do,  ds = w (do v' - sum of do o),  dq = scale ds k,  dk = scale ds' q  (Dao et al. 2022, arXiv:2205.14135, section
    3.1).
    """

    @staticmethod
    def forward(
        ctx: Any, layer: AttentionLayer, clusters: Clusters, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor
    ) -> Tensor:
        out_SHU, log_sums_SH = operations.attend_in_clusters(layer, q_SHC, k_SJC, v_SJU, clusters)
        ctx.save_for_backward(q_SHC, k_SJC, v_SJU, out_SHU, log_sums_SH)
        ctx.layer, ctx.clusters = layer, clusters
        return out_SHU

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_SHC, k_SJC, v_SJU, out_SHU, log_sums_SH = ctx.saved_tensors
        given = (ctx.layer, q_SHC, k_SJC, v_SJU, ctx.clusters, out_SHU, log_sums_SH, grads[0])
        return None, None, *operations.attend_in_clusters_backward(*given)


class Linear(torch.autograd.Function):
    """A linear layer with gradients, y = x W' + b:  dx = dy W,  dW = dy' x,  db = the sum of dy's rows."""

    @staticmethod
    def forward(ctx: Any, ops: TorchOps, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_ND, weight_FD)
        ctx.ops = ops
        return ops.product(x_ND, weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_FD = ctx.saved_tensors
        (grad_NF,) = grads
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            None,
            ctx.ops.input_gradient(grad_NF, weight_FD) if needs_x else None,
            ctx.ops.weight_gradient(x_ND, grad_NF) if needs_weight else None,
            grad_NF.sum(0) if needs_bias else None,
        )


class LinearByGroup(torch.autograd.Function):
    """`Linear` for rows sorted by expert, each group with its expert's weight."""

    @staticmethod
    def forward(ctx: Any, ops: TorchOps, x_RD: Tensor, weight_EDF: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x_RD, weight_EDF)
        ctx.ops, ctx.counts = ops, counts
        return ops.product_by_group(x_RD, weight_EDF, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_EDF = ctx.saved_tensors
        parts = grads[0].split(ctx.counts)
        grad_x_RD = grad_weight_EDF = None
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        if needs_x:
            grad_x_RD = torch.cat([ctx.ops.input_gradient(part, weight_EDF[e].t()) for e, part in enumerate(parts)])
        if needs_weight:
            grad_weight_EDF = torch.empty_like(weight_EDF)
            for e, (x_ND, grad_NF) in enumerate(zip(x_RD.split(ctx.counts), parts, strict=True)):
                grad_weight_EDF[e] = ctx.ops.weight_gradient(x_ND, grad_NF).t()
        return None, grad_x_RD, grad_weight_EDF, None
