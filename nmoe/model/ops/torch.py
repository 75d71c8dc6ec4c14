"""The definition of every operation, in torch. Some gradients are written out.

On a CPU torch's `rms_norm` differentiates each of its steps: 6.3 ms forward and backward for 6144 x 128 in fp32. The closed form
below takes a third of that (one Zen 5 core, torch 2.13).

Rows move between tokens and experts with no atomics and in a fixed order. `_Dispatch` copies every token's row to the experts that
it chose; `_Combine` adds up the results, each row times its weight. torch's backward of a gather adds rows in the order in which
threads arrive, and on CUDA rounds each sum to bf16; here it is a sum of K rows in order.
"""

# Shapes: N rows, D inputs or width, F outputs or hidden units, E experts, R rows sorted by expert, T tokens, K chosen experts, H
# query heads, J key-value heads, C head width, c pairs of a rotary turn, U value width, B sequences or rows, L queries, S keys, N
# blocks of P positions of a cache, M blocks of a row, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.ops import attention, delta
from nmoe.model.ops.attention import AttentionLayer, Clusters

# gpt-oss's sigmoid slope (its release; also the common approximation of GELU by x * sigmoid(1.702 x)).
SLOPE = 1.702

LOW_PRECISION = (torch.bfloat16, torch.float16)

Norms = tuple[Tensor, Tensor, float]


class TorchOps:
    """The operations in torch, on any device, and the interface of all tables of operations. A table has no state."""

    exact = False  # whether a row's bits do not depend on the batch
    attends_in_blocks = False  # whether there is `attend_in_blocks`

    # Products

    def linear(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """Returns `x @ weight.T + bias`."""
        return F.linear(x_ND, weight_FD, bias_F)

    def product(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """Computes `linear` without gradients."""
        return F.linear(x_ND, weight_FD, bias_F)

    def linear_in_fp32(self, x_ND: Tensor, weight_FD: Tensor) -> Tensor:
        """Returns `x @ weight.T` in fp32 for x and weight in a narrower dtype, whose products fp32 holds exactly."""
        if torch.is_grad_enabled():
            return self.linear(x_ND.float(), weight_FD.float())
        return self.logits(x_ND, self.head_weight(weight_FD), len(weight_FD))

    def input_gradient(self, grad_NF: Tensor, weight_FD: Tensor) -> Tensor:
        """Returns `grad @ weight`, the gradient of a linear layer's input."""
        return grad_NF @ weight_FD

    def weight_gradient(self, x_ND: Tensor, grad_NF: Tensor) -> Tensor:
        """Returns `grad.T @ x`, the gradient of a linear layer's weight, `[F, D]`."""
        return grad_NF.t() @ x_ND

    def linear_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
        """Multiplies each row by its expert's weight, `x @ weight[e]`, `[R, F]`. Rows are sorted by expert, `counts[e]` for expert
        e."""
        weights = weight_EDF.unbind(0)
        return torch.cat([part @ weights[e] for e, part in enumerate(x_RD.split(list(counts)))])

    def product_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes `linear_by_group` without gradients."""
        return self.linear_by_group(x_RD, weight_EDF, counts)

    def loops_over_experts(self, x_RD: Tensor, longest: int, width: int, hidden: int) -> bool:
        """Returns whether one product per expert, of at most `longest` rows by `width` by `hidden`, is faster than a grouped
        product."""
        return False

    # Norms and rotary turns

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Applies root-mean-square normalisation over the last axis. The weight is `[D]`, or has an axis for each of the last few
        axes of x."""
        if not torch.is_grad_enabled():
            return (x_ND * _inverse_rms(x_ND, eps)).to(x_ND.dtype).mul_(weight_D)
        out: Tensor = _RMSNorm.apply(x_ND, weight_D, eps)
        return out

    def turn(self, x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        """Computes `rotate` without gradients."""
        half = x_TNC.shape[-1] // 2
        first, second = x_TNC[..., :half], x_TNC[..., half:]
        out_TNC = torch.empty_like(x_TNC, memory_format=torch.contiguous_format)
        torch.mul(first, cos_T1c, out=out_TNC[..., :half]).addcmul_(second, sin_T1c, value=-1)
        torch.mul(second, cos_T1c, out=out_TNC[..., half:]).addcmul_(first, sin_T1c)
        return out_TNC

    def rotate(self, x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        """Turns each pair `(x[i], x[i + C/2])` of every head by its position's angle (Su et al. 2021, arXiv:2104.09864), in the
        half-split layout of Llama and Qwen. cos and sin are `[T, 1, C/2]`."""
        if not torch.is_grad_enabled():
            return self.turn(x_TNC, cos_T1c, sin_T1c)
        out: Tensor = _Rotate.apply(self, x_TNC, cos_T1c, sin_T1c)
        return out

    def norm_and_rotate(
        self, qkv_TNC: Tensor, norms: Norms | None, cos_T1c: Tensor, sin_T1c: Tensor, heads: int, kv_heads: int
    ) -> Tensor:
        """Returns the query heads, then the key heads, of `[T, heads + 2 kv_heads, C]`, after RMSNorm if `norms` are given (the
        weights for queries and keys, and epsilon) and rotary embedding. May change its input."""
        qk_TNC = qkv_TNC[:, : heads + kv_heads]
        if norms is not None:
            q_norm_C, k_norm_C, eps = norms
            # Queries and keys at once, each head with its kind's scale: small operations cost their launch.
            scales = [q_norm_C.expand(heads, -1), k_norm_C.expand(kv_heads, -1)]
            qk_TNC = self.rms_norm(qk_TNC, torch.cat(scales), eps)
        return self.rotate(qk_TNC, cos_T1c, sin_T1c)

    # Activations

    def sigmoid(self, x: Tensor) -> Tensor:
        """Returns `1 / (1 + exp(-x))`."""
        return torch.sigmoid(x)

    def silu(self, x: Tensor) -> Tensor:
        """Returns `x * sigmoid(x)`."""
        return F.silu(x)

    def softplus(self, x: Tensor) -> Tensor:
        """Returns `log(1 + exp(x))`."""
        return F.softplus(x)

    def gelu(self, x: Tensor) -> Tensor:
        """Returns GELU by its approximation with tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
        return F.gelu(x, approximate="tanh")

    def geglu(self, gate_up_NF: Tensor) -> Tensor:
        """Returns `gelu(gate) * up`, where gate and up are the two halves of the last axis."""
        gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
        return self.gelu(gate_NF) * up_NF

    def swiglu(self, gate_up_NF: Tensor, limit: float = 0.0) -> Tensor:
        """Returns `silu(gate) * up`, where gate and up are the two halves of the last axis (Shazeer 2020, arXiv:2002.05202). With a
        limit, computes gpt-oss's clamped form: gate is at most the limit and up within +-limit, then `gate * sigmoid(1.702 gate) *
        (up + 1)`."""
        gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
        if limit:
            gate_NF, up_NF = gate_NF.clamp(max=limit), up_NF.clamp(-limit, limit)
            return gate_NF * self.sigmoid(SLOPE * gate_NF) * (up_NF + 1)
        return self.silu(gate_NF) * up_NF

    def swiglu_linear(self, x_ND: Tensor, gate_up_FD: Tensor) -> Tensor:
        """Returns `swiglu(linear(x, gate_up))`."""
        return self.swiglu(self.linear(x_ND, gate_up_FD))

    # Routing

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
        """Runs a router without expert groups: returns weights and ids of the chosen experts, `[T, K]` each; None if no single
        kernel does it."""
        return None

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
        """Runs a layer's routed experts: returns each token's weighted sum over its experts, `[T, D]`; None if no single kernel
        does it."""
        return None

    def sum_rows(self, y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
        """Returns `out[t] = sum over k of weights[t, k] * y[row[t, k]]`, or the plain sum without weights. Without gradients."""
        if weights_TK is None:
            return _gathered(y_RD, row_TK).sum(1)
        return torch.bmm(weights_TK.to(y_RD.dtype).unsqueeze(1), _gathered(y_RD, row_TK)).squeeze(1)

    def spread_rows(self, grad_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of `sum_rows` with respect to the rows and to the weights."""
        grad_weights_TK = torch.bmm(_gathered(y_RD, row_TK), grad_TD.unsqueeze(-1)).squeeze(-1).to(weights_TK.dtype)
        grad_TKD = grad_TD.unsqueeze(1) * weights_TK.to(y_RD.dtype).unsqueeze(-1)
        grad_RD = torch.empty_like(y_RD).index_copy_(0, row_TK.reshape(-1), grad_TKD.flatten(0, 1))
        return grad_RD, grad_weights_TK

    def dispatch(self, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        """Copies each token's row to its K experts: row r of the result is token `token_R[r]`'s. `row_TK` is the inverse: the rows
        of each token's K copies."""
        out: Tensor = _Dispatch.apply(self, x_TD, token_R, row_TK)
        return out

    def combine(self, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
        """Returns each token's weighted sum over its K rows, `[T, D]`. No token's sum depends on another token's position."""
        out: Tensor = _Combine.apply(self, y_RD, weights_TK, row_TK)
        return out

    # Attention

    def causal_attention(
        self, layer: AttentionLayer, q_BHLC: Tensor, k_BJSC: Tensor, v_BJSU: Tensor, earlier: int = 0
    ) -> Tensor:
        """Computes attention of the last L of S = earlier + L positions to all before them, `[B, H, L, U]`, with the layer's window
        and sinks."""
        return attention.causal_attention(layer, q_BHLC, k_BJSC, v_BJSU, earlier)

    def takes_clusters(self, layer: AttentionLayer, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, longest: int) -> bool:
        """Returns whether `attend_in_clusters` can run for this layer and these tensors; `longest` is the length of the longest
        sequence."""
        return False

    def attend_in_clusters(
        self, layer: AttentionLayer, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, clusters: Clusters
    ) -> Tensor:
        """Computes causal attention of packed sequences that share leading rows, `[S, H, U]`. Call it only if `takes_clusters` is
        true."""
        raise NotImplementedError("`takes_clusters` was asked")

    def paged_attention(
        self,
        layer: AttentionLayer,
        q_BHC: Tensor,
        keys_NJPC: Tensor,
        values_NJPU: Tensor,
        table_BM: Tensor,
        lengths_B: Tensor,
    ) -> Tensor:
        """Decodes with a paged cache: attention of each row's one query, at its last position, to the row's first `lengths_B`
        positions, `[B, H, U]` in the query's dtype. Position p of row b lies in block `table_BM[b, p // P]` at index `p % P`. Sums
        are in fp32 (in fp64 if the cache is); a row of length 0 gets zeros."""
        return attention.paged_attention(layer, q_BHC, keys_NJPC, values_NJPU, table_BM, lengths_B)

    def attend_in_blocks(
        self,
        layer: AttentionLayer,
        q_BHC: Tensor,
        keys_NJPC: Tensor,
        values_NJPU: Tensor,
        table_SM: Tensor,
        positions_B: Tensor,
        sequence_B: Tensor | None = None,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Runs `nmoe.model.ops.cpu.operations.attention`. Call it only if `attends_in_blocks` is true."""
        raise NotImplementedError("`attends_in_blocks` was asked")

    def delta_rule(
        self,
        q_BLHC: Tensor,
        k_BLHC: Tensor,
        v_BLHU: Tensor,
        decay_BLH: Tensor,
        beta_BLH: Tensor,
        memory_BHCU: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Runs the gated delta rule: returns the output of each token, `[B, L, H, U]`, and the memory after the last token."""
        one = q_BLHC.shape[1] == 1
        return (delta.scan if one else delta.by_chunks)(q_BLHC, k_BLHC, v_BLHU, decay_BLH, beta_BLH, memory_BHCU)

    # The head

    def head_weight(self, weight_VD: Tensor) -> Tensor:
        """Prepares the output head's weight for `logits`, once for several pieces of rows. For low precision and exact numerics."""
        return weight_VD.float()

    def logits(self, x_ND: Tensor, head_weight: Tensor, vocabulary: int) -> Tensor:
        """Returns `x @ head_weight.T` in fp32, `[N, V]` with V = `vocabulary`, without gradients. The method `head_weight` made the
        weight."""
        return self.linear(x_ND.float(), head_weight)

    def takes_head(self, x_ND: Tensor, weight_VD: Tensor) -> bool:
        """Returns whether `head_forward` and `head_backward` can run for these tensors."""
        return False

    def head_forward(
        self, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs `nmoe.model.ops.cpu.operations.head_forward`. Call it only if `takes_head` is true."""
        raise NotImplementedError("`takes_head` was asked")

    def head_backward(
        self,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        largest_N: Tensor,
        factor_N: Tensor,
        slope_N: Tensor,
        onehot_N: Tensor,
        of_x: bool,
        of_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Runs `nmoe.model.ops.cpu.operations.head_backward`. Call it only if `takes_head` is true."""
        raise NotImplementedError("`takes_head` was asked")

    # Sampling

    def sample(
        self, logits_BV: Tensor, temperature_B: Tensor, uniforms_B: Tensor
    ) -> tuple[Tensor, Tensor, bool] | None:
        """Samples from the whole vocabulary: returns tokens and their log-probabilities, `[B]` each, and whether all logits were
        finite; None if no single kernel does it."""
        return None

    def kept_mask(self, logits_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor | None:
        """Returns a mask `[B, V]` of the tokens that top-k and then top-p keep; None if no single kernel does it."""
        return None


def _inverse_rms(x_ND: Tensor, eps: float) -> Tensor:
    """Returns 1 / sqrt(mean(x^2) + eps), `[N, 1]`, in fp32 or better: in bf16 it would scale a row wrong by up to 0.4%."""
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    norm_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True, dtype=dtype)
    return norm_N1.square_().div_(x_ND.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """Computes y = x * r * w with r = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4), and its
    gradients."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        inverse_rms_N1 = _inverse_rms(x_ND, eps)
        ctx.save_for_backward(x_ND, weight_D, inverse_rms_N1)
        return (x_ND * inverse_rms_N1).to(x_ND.dtype).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_ND, weight_D, inverse_rms_N1 = ctx.saved_tensors
        (grad_ND,) = grads
        # With z = x r:  dz = g w,  dx = r (dz - z mean(dz z)),  dw = sum over rows of g z.
        z_ND = x_ND * inverse_rms_N1
        gz_ND = grad_ND * z_ND
        grad_weight_D = gz_ND.reshape(-1, *weight_D.shape).sum(0)
        if weight_D.dim() == 1:
            mean_N1 = (gz_ND @ weight_D.to(gz_ND.dtype)).unsqueeze(-1).div_(x_ND.shape[-1])
        else:
            mean_N1 = gz_ND.mul_(weight_D).mean(-1, keepdim=True)
        grad_x_ND = (grad_ND * weight_D).sub_(z_ND.mul_(mean_N1)).mul_(inverse_rms_N1)
        return grad_x_ND.to(x_ND.dtype), grad_weight_D.to(weight_D.dtype), None


class _Rotate(torch.autograd.Function):
    """The rotary embedding, scaled if the tables are scaled. Its gradient is the transposed map, the rotation back."""

    @staticmethod
    def forward(ctx: Any, ops: TorchOps, x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1c, sin_T1c)
        ctx.ops = ops
        return ops.turn(x_TNC, cos_T1c, sin_T1c)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        cos_T1c, sin_T1c = ctx.saved_tensors
        return None, ctx.ops.turn(grads[0], cos_T1c, -sin_T1c), None, None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: TorchOps, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.ops = ops
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return None, ctx.ops.sum_rows(grads[0], None, row_TK), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: TorchOps, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK, row_TK)
        ctx.ops = ops
        return ops.sum_rows(y_RD, weights_TK, row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, None]:
        return None, *ctx.ops.spread_rows(grads[0], *ctx.saved_tensors), None


def _gathered(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    return y_RD.index_select(0, row_TK.reshape(-1)).view(*row_TK.shape, -1)
