"""The layers of a decoder: linear layers, norms, dense feed-forward blocks, and attention with its projections, QK-norm and rotary
embedding.

The caller supplies the attention over keys and values, as an `Attend`: the learner attends within packed sequences, the engine to a
cache. All the rest is the same code with the same weights, so sampler and learner cannot drift apart.
"""

# Shapes: N rows (in attention: heads of several kinds), T tokens, D inputs or width, F outputs or hidden units, H query heads, J
# key-value heads, C head width, U value width, R rank of the latents, L latents and rotated keys together.

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from nmoe.model.config import ModelConfig
from nmoe.model.low_rank import LowRank
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.ops.table import ops_for
from nmoe.model.ops.torch import LOW_PRECISION


class Linear(nn.Module):
    """A linear layer, `x @ weight.T + bias` with a weight `[F, D]`, plus the low-rank updates of an adapter if there is one."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.exact = False
        self.adapter: LowRank | None = None

    def forward(self, x_ND: Tensor) -> Tensor:
        if self.adapter is None:
            return ops_for(x_ND, self.exact).linear(x_ND, self.weight, self.bias)
        out_NF: Tensor = self.adapter(x_ND, self.weight, self.bias, self.exact)
        return out_NF


def head_logits(x_ND: Tensor, weight_VD: Tensor, exact: bool) -> Tensor:
    """Returns the output head's logits `x @ weight.T`, `[rows, vocabulary]` in fp32 at least: rounding logits of about 30 to bf16
    makes errors of some hundredths."""
    low = x_ND.dtype in LOW_PRECISION
    if low and not exact:
        return ops_for(x_ND).linear_in_fp32(x_ND, weight_VD)
    if low:
        x_ND, weight_VD = x_ND.float(), weight_VD.float()
    return ops_for(x_ND, exact).linear(x_ND, weight_VD)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis with a learned scale (Zhang and Sennrich 2019, arXiv:1910.07467): the
    weight or, with `offset`, one plus the weight."""

    def __init__(self, width: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps, self.offset = eps, offset

    @property
    def factors(self) -> Tensor:
        """The factors that multiply the normalised numbers."""
        # The sum is rounded only once.
        return (1 + self.weight.float()).to(self.weight.dtype) if self.offset else self.weight

    def forward(self, x_ND: Tensor) -> Tensor:
        return ops_for(x_ND).rms_norm(x_ND, self.factors, self.eps)


class SwiGLU(nn.Module):
    """A dense SwiGLU feed-forward block. The gate's and the up projection's weights are one matrix, in that order."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, 2 * intermediate)
        self.down_proj = Linear(intermediate, width)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_up = self.gate_up_proj
        if gate_up.adapter is None and gate_up.bias is None:
            hidden_TF = ops_for(x_TD, gate_up.exact).swiglu_linear(x_TD, gate_up.weight)
        else:
            gate_up_TF = gate_up(x_TD)
            hidden_TF = ops_for(gate_up_TF, gate_up.exact).swiglu(gate_up_TF)
        out_TD: Tensor = self.down_proj(hidden_TF)
        return out_TD


class GeGLU(SwiGLU):
    """A dense feed-forward block with GELU, by its approximation with tanh, instead of SiLU (Shazeer 2020, arXiv:2002.05202)."""

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_up_TF = self.gate_up_proj(x_TD)
        out_TD: Tensor = self.down_proj(ops_for(gate_up_TF, self.gate_up_proj.exact).geglu(gate_up_TF))
        return out_TD


class Attend(Protocol):
    """Protocol of attention: each packed query attends to the keys and values that it may see, `o_THU = attend(layer,
    q_THC, k_TJC, v_TJU)`."""

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor: ...


@runtime_checkable
class LatentAttend(Protocol):
    """An `Attend` that stores latents of latent attention, and expands them to keys and values when needed."""

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor: ...

    def attend_latents(
        self, layer: AttentionLayer, q_THC: Tensor, latents_TL: Tensor, block: LatentAttentionBlock
    ) -> Tensor:
        """Computes attention over latents, each concatenated with its rotated key part, `[T, H, U]`."""


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245). Query, key and value weights are one matrix, in that order,
    because a small product costs more to launch than to compute. The rows of an output gate (Qiu et al. 2025, arXiv:2505.06708), if
    there is one, come before the queries' rows."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.scale, self.window = layer, config.scale, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.gates = config.heads if config.attention_gate else 0
        columns = (self.gates + config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, columns, config.qkv_bias)
        self.o_proj = Linear(config.heads * config.head_dim, config.hidden_size, config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None

    def forward(self, x_TD: Tensor, cos_T1c: Tensor, sin_T1c: Tensor, attend: Attend) -> Tensor:
        tokens = x_TD.shape[0]
        turned = self.heads + self.kv_heads
        qkv_TNC = self.qkv_proj(x_TD).view(tokens, self.gates + turned + self.kv_heads, self.head_dim)
        gate_THC, qkv_TNC = qkv_TNC[:, : self.gates], qkv_TNC[:, self.gates :]
        v_TJC = qkv_TNC[:, turned:]
        qk_TNC = self._normed_and_turned(qkv_TNC, cos_T1c, sin_T1c)
        q_THC, k_TJC = qk_TNC[:, : self.heads], qk_TNC[:, self.heads :]
        layer = AttentionLayer(self.layer, self.scale, self.window, self.sinks)
        o_THC = attend(layer, q_THC, k_TJC, v_TJC)
        if self.gates:
            o_THC = o_THC * ops_for(gate_THC, self.o_proj.exact).sigmoid(gate_THC)
        out_TD: Tensor = self.o_proj(o_THC.reshape(tokens, -1))
        return out_TD

    def _normed_and_turned(self, qkv_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        """Returns query heads, then key heads, after QK-norm (if any) and rotary embedding."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.factors, self.k_norm.factors, self.q_norm.eps
        return ops_for(qkv_TNC).norm_and_rotate(qkv_TNC, norms, cos_T1c, sin_T1c, self.heads, self.kv_heads)


# DeepSeek's release and transformers use this for latents, and ignore rms_norm_eps.
_LATENT_NORM_EPS = 1e-6


class LatentAttentionBlock(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, eq. 9-19), with keys and values expanded per head. A cache of
    latents can attend without expansion, by `to_latents` and `from_latents` (section 2.1.2 there)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.latent is not None, "the caller looks"
        latent = self.latent = config.latent
        self.layer, self.scale, self.window, self.heads = layer, config.scale, config.window(layer), config.heads
        self.q_a_proj = Linear(config.hidden_size, latent.q_rank) if latent.q_rank else None
        self.q_a_norm = RMSNorm(latent.q_rank, _LATENT_NORM_EPS) if latent.q_rank else None
        self.q_proj = Linear(latent.q_rank or config.hidden_size, config.heads * config.head_dim)
        self.kv_a_proj = Linear(config.hidden_size, latent.kv_rank + latent.rope_dim)
        self.kv_a_norm = RMSNorm(latent.kv_rank, _LATENT_NORM_EPS)
        self.kv_b_proj = Linear(latent.kv_rank, config.heads * (latent.nope_dim + latent.value_dim))
        self.o_proj = Linear(config.heads * latent.value_dim, config.hidden_size)

    def forward(self, x_TD: Tensor, cos_T1c: Tensor, sin_T1c: Tensor, attend: Attend) -> Tensor:
        tokens, latent = x_TD.shape[0], self.latent
        q_TD = x_TD if self.q_a_proj is None or self.q_a_norm is None else self.q_a_norm(self.q_a_proj(x_TD))
        q_THC = self.q_proj(q_TD).view(tokens, self.heads, -1)
        q_nope_THC, q_rope_THC = q_THC.split([latent.nope_dim, latent.rope_dim], -1)
        kv_TD, k_rope_TC = self.kv_a_proj(x_TD).split([latent.kv_rank, latent.rope_dim], -1)
        kv_TR = self.kv_a_norm(kv_TD)
        rope_TNC = torch.cat([q_rope_THC, k_rope_TC.unsqueeze(1)], 1)
        turned_TNC = ops_for(rope_TNC).rotate(rope_TNC, cos_T1c, sin_T1c)
        q_THC = torch.cat([q_nope_THC, turned_TNC[:, :-1]], -1)
        latents_TL = torch.cat([kv_TR, turned_TNC[:, -1]], -1)
        layer = AttentionLayer(self.layer, self.scale, self.window)
        if isinstance(attend, LatentAttend):
            o_THU = attend.attend_latents(layer, q_THC, latents_TL, self)
        else:
            o_THU = attend(layer, q_THC, *self.expanded(latents_TL))
        out_TD: Tensor = self.o_proj(o_THU.reshape(tokens, -1))
        return out_TD

    def expanded(self, latents_TL: Tensor) -> tuple[Tensor, Tensor]:
        """Expands latents to the keys `[T, H, C]` and the values `[T, H, U]` of every head."""
        latent = self.latent
        kv_TR, k_rope_TC = latents_TL.split([latent.kv_rank, latent.rope_dim], -1)
        # An adapter's small products of non-contiguous rows would depend on the batch.
        kv_THC = self.kv_b_proj(kv_TR.contiguous()).view(len(latents_TL), self.heads, -1)
        k_nope_THC, v_THU = kv_THC.split([latent.nope_dim, latent.value_dim], -1)
        return torch.cat([k_nope_THC, k_rope_TC.unsqueeze(1).expand(-1, self.heads, -1)], -1), v_THU

    def to_latents(self, q_THC: Tensor) -> Tensor:
        """Turns queries into queries `[T, H, L]` over latents: their products with latents equal the products of `q_THC` with the
        keys that `expanded` returns."""
        q_nope_THC, q_rope_THC = q_THC.split([self.latent.nope_dim, self.latent.rope_dim], -1)
        keys_HCR = self._expansion()[:, : self.latent.nope_dim]
        q_THR = torch.bmm(q_nope_THC.transpose(0, 1).to(keys_HCR.dtype), keys_HCR).transpose(0, 1)
        return torch.cat([q_THR.to(q_THC.dtype), q_rope_THC], -1)

    def from_latents(self, o_THR: Tensor) -> Tensor:
        """Turns weighted sums of latents into weighted sums of values, `[T, H, U]`."""
        values_HUR = self._expansion()[:, self.latent.nope_dim :]
        o_HTR = o_THR.transpose(0, 1).to(values_HUR.dtype)
        return torch.bmm(o_HTR, values_HUR.transpose(1, 2)).transpose(0, 1).to(o_THR.dtype)

    def _expansion(self) -> Tensor:
        """Returns the weight of `kv_b_proj` by heads, `[H, nope + value, R]`, with an adapter's update added in fp32."""
        weight, adapter = self.kv_b_proj.weight, self.kv_b_proj.adapter
        whole = weight if adapter is None else adapter.merged(weight.float())
        return whole.view(self.heads, -1, self.latent.kv_rank)
