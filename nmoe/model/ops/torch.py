"""The definition of every operation, in torch."""

# Shapes: N rows, D inputs or width, F outputs or hidden units, E experts, R rows sorted by expert, T tokens, K chosen experts, H
# query heads, J key-value heads, C head width, c pairs of a rotary turn, U value width, B sequences or rows, L queries, S keys, N
# blocks of P positions of a cache, M blocks of a row, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.ops import attention, delta, gradients
from nmoe.model.ops.attention import AttentionLayer, Clusters

# gpt-oss's sigmoid slope (its release; also the common approximation of GELU by x * sigmoid(1.702 x)).
SLOPE = 1.702

Norms = tuple[Tensor, Tensor, float]


class TorchOps:
    """Operations on any device. A table has no state."""

    exact = False  # whether a row's bits do not depend on the batch
    attends_in_blocks = False  # whether there is `attend_in_blocks`

    # Products

    def linear(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`."""
        return F.linear(x_ND, weight_FD, bias_F)

    def product(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """`linear` without gradients."""
        return F.linear(x_ND, weight_FD, bias_F)

    def linear_in_fp32(self, x_ND: Tensor, weight_FD: Tensor) -> Tensor:
        """`x @ weight.T` in fp32 of a narrower x and weight, whose products fp32 holds exactly."""
        if torch.is_grad_enabled():
            return self.linear(x_ND.float(), weight_FD.float())
        return self.prepared_in_fp32(weight_FD)(x_ND)

    def prepared(self, weight_FD: Tensor) -> Callable[[Tensor], Tensor]:
        """`linear(x, weight)` without gradients, for several x: what the products need of the weight is made once."""
        return lambda x_ND: self.linear(x_ND, weight_FD)

    def prepared_in_fp32(self, weight_FD: Tensor) -> Callable[[Tensor], Tensor]:
        """`linear_in_fp32(x, weight)` without gradients, for several x."""
        wide_FD = weight_FD.float()
        return lambda x_ND: self.linear(x_ND.float(), wide_FD)

    def input_gradient(self, grad_NF: Tensor, weight_FD: Tensor) -> Tensor:
        """`grad @ weight`, the gradient of a linear layer's input."""
        return grad_NF @ weight_FD

    def weight_gradient(self, x_ND: Tensor, grad_NF: Tensor) -> Tensor:
        """`grad.T @ x`, the gradient of a linear layer's weight, `[F, D]`."""
        return grad_NF.t() @ x_ND

    def linear_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
        """`x @ weight[e]` for each group of rows, `counts[e]` of them for expert e, in order."""
        weights = weight_EDF.unbind(0)
        return torch.cat([part @ weights[e] for e, part in enumerate(x_RD.split(list(counts)))])

    def product_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
        """`linear_by_group` without gradients."""
        return self.linear_by_group(x_RD, weight_EDF, counts)

    def loops_over_experts(self, x_RD: Tensor, longest: int, width: int, hidden: int) -> bool:
        """Whether one product per expert, of at most `longest` rows by `width` by `hidden`, is faster than a grouped product."""
        return False

    # Norms and rotary turns

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Root-mean-square normalisation over the last axis. The weight is `[D]`, or has an axis for each of the last few of x."""
        return gradients.rms_norm(x_ND, weight_D, eps)

    def turn(self, x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        """`rotate` without gradients."""
        return gradients.turn(x_TNC, cos_T1c, sin_T1c)

    def rotate(self, x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        """Turns each pair `(x[i], x[i + C/2])` of every head by its position's angle. cos and sin are `[T, 1, C/2]`."""
        if not torch.is_grad_enabled():
            return self.turn(x_TNC, cos_T1c, sin_T1c)
        out: Tensor = gradients.Rotate.apply(self.turn, x_TNC, cos_T1c, sin_T1c)
        return out

    def norm_and_rotate(
        self, qkv_TNC: Tensor, norms: Norms | None, cos_T1c: Tensor, sin_T1c: Tensor, heads: int, kv_heads: int
    ) -> Tensor:
        """The query heads, then the key heads, of `[T, heads + 2 kv_heads, C]`: normed, where there are `norms` (the weights of
        queries and keys, and epsilon), then rotated. May change its input."""
        qk_TNC = qkv_TNC[:, : heads + kv_heads]
        if norms is not None:
            q_norm_C, k_norm_C, eps = norms
            # Queries and keys at once, each head with its kind's scale: small operations cost their launch.
            scales = [q_norm_C.expand(heads, -1), k_norm_C.expand(kv_heads, -1)]
            qk_TNC = self.rms_norm(qk_TNC, torch.cat(scales), eps)
        return self.rotate(qk_TNC, cos_T1c, sin_T1c)

    # Activations

    def sigmoid(self, x: Tensor) -> Tensor:
        """`1 / (1 + exp(-x))`."""
        return torch.sigmoid(x)

    def silu(self, x: Tensor) -> Tensor:
        """`x * sigmoid(x)`."""
        return F.silu(x)

    def softplus(self, x: Tensor) -> Tensor:
        """`log(1 + exp(x))`."""
        return F.softplus(x)

    def gelu(self, x: Tensor) -> Tensor:
        """GELU by its approximation with tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
        return F.gelu(x, approximate="tanh")

    def geglu(self, gate_up_NF: Tensor) -> Tensor:
        """`gelu(gate) * up`, of the two halves of the last axis."""
        gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
        return self.gelu(gate_NF) * up_NF

    def swiglu(self, gate_up_NF: Tensor, limit: float = 0.0) -> Tensor:
        """`silu(gate) * up`, of the two halves of the last axis (Shazeer 2020, arXiv:2002.05202). With a limit, gpt-oss's clamped
        form: gate at most and up within the limit, then `gate * sigmoid(1.702 gate) * (up + 1)`."""
        gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
        if limit:
            gate_NF, up_NF = gate_NF.clamp(max=limit), up_NF.clamp(-limit, limit)
            return gate_NF * self.sigmoid(SLOPE * gate_NF) * (up_NF + 1)
        return self.silu(gate_NF) * up_NF

    def swiglu_linear(self, x_ND: Tensor, gate_up_FD: Tensor) -> Tensor:
        """`swiglu(linear(x, gate_up))`."""
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
        """Weights and ids, `[T, K]` each, of the experts that a router without groups picks, where one kernel does it all."""
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
        """Each token's weighted sum over its experts, `[T, D]`, where one kernel does it all."""
        return None

    def sum_rows(self, y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
        """`out[t] = sum over k of weights[t, k] * y[row[t, k]]`, without weights the plain sum; without gradients."""
        return gradients.sum_rows(y_RD, weights_TK, row_TK)

    def spread_rows(self, grad_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `sum_rows` for its rows and its weights."""
        return gradients.spread_rows(grad_TD, y_RD, weights_TK, row_TK)

    def dispatch(self, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        """Row r of the result is token `token_R[r]`'s. `row_TK` is the way back: where each token's K rows went."""
        out: Tensor = gradients.Dispatch.apply(self, x_TD, token_R, row_TK)
        return out

    def combine(self, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
        """Each token's weighted sum over its own K rows, `[T, D]`: no token's sum depends on another's place."""
        out: Tensor = gradients.Combine.apply(self, y_RD, weights_TK, row_TK)
        return out

    # Attention

    def causal_attention(
        self, layer: AttentionLayer, q_BHLC: Tensor, k_BJSC: Tensor, v_BJSU: Tensor, earlier: int = 0
    ) -> Tensor:
        """Attention of the last L of S = earlier + L positions to all before them, `[B, H, L, U]`, with the layer's window and
        sinks."""
        return attention.causal_attention(layer, q_BHLC, k_BJSC, v_BJSU, earlier)

    def takes_clusters(self, layer: AttentionLayer, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, longest: int) -> bool:
        """Whether there are `attend_in_clusters` and its gradient for these, of sequences up to the longest."""
        return False

    def attend_in_clusters(
        self, layer: AttentionLayer, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, clusters: Clusters
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of packed sequences, `[S, H, U]`, and the logarithms of the sums of exponentials, `[S, H]`, where
        `takes_clusters` says so."""
        raise NotImplementedError("`takes_clusters` was asked")

    def attend_in_clusters_backward(
        self,
        layer: AttentionLayer,
        q_SHC: Tensor,
        k_SJC: Tensor,
        v_SJU: Tensor,
        clusters: Clusters,
        out_SHU: Tensor,
        log_sums_SH: Tensor,
        grad_SHU: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""
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
        """What each row's query, that of its last position, sees of the row's first `lengths_B` positions, `[B, H, U]` in the
        query's dtype. Position p of row b lies in block `table_BM[b, p // P]` at place `p % P`. Sums are in fp32 (in fp64 where the
        cache is); a row of length 0 gets zeros."""
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
        """`nmoe.model.ops.cpu.operations.attention`, where `attends_in_blocks` says so."""
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
        """What each token reads by the gated delta rule, `[B, L, H, U]`, and the memory after the last one."""
        one = q_BLHC.shape[1] == 1
        return (delta.scan if one else delta.by_chunks)(q_BLHC, k_BLHC, v_BLHU, decay_BLH, beta_BLH, memory_BHCU)

    # The head over a wide vocabulary

    def takes_head(self, x_ND: Tensor, weight_VD: Tensor) -> bool:
        """Whether there are `head_forward` and `head_backward` for these."""
        return False

    def head_forward(
        self, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`nmoe.model.ops.cpu.operations.head_forward`, where `takes_head` says so."""
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
        """`nmoe.model.ops.cpu.operations.head_backward`, where `takes_head` says so."""
        raise NotImplementedError("`takes_head` was asked")

    # Sampling

    def sample(
        self, logits_BV: Tensor, temperature_B: Tensor, uniforms_B: Tensor
    ) -> tuple[Tensor, Tensor, bool] | None:
        """Tokens, their log-probabilities, `[B]` each, and whether all logits were finite, where one kernel does it all; rows use
        their whole support."""
        return None

    def kept_mask(self, logits_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor | None:
        """The tokens that top-k and then top-p keep, `[B, V]`, where one kernel finds them."""
        return None
