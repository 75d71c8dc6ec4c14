"""Attention: projections, QK-norm and rotary embedding, with the attending itself left to the caller.

The learner attends within packed sequences, the engine attends to a cache: each hands in an `Attend`. Everything else
is the same code and the same weights, which is what keeps sampler and learner from drifting apart.
"""

# Shapes: T tokens, D width, H query heads, J key-value heads, C head width, U value width, N heads of several kinds.

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from nmoe.model.config import ModelConfig
from nmoe.model.kernels.cpu import library, operations
from nmoe.model.linear import Linear
from nmoe.model.norm import RMSNorm, rms_norm
from nmoe.model.rope import rotate


@dataclass(frozen=True)
class AttentionLayer:
    """What an `Attend` has to know of the layer that calls it.

    `window` tokens back, the query's own included, can be seen (0: all). `sinks_H` is each query head's logit that takes part
    in the softmax's sum and in nothing else (Xiao et al. 2023, arXiv:2309.17453, as learned in gpt-oss).
    """

    index: int
    scale: float
    window: int = 0
    sinks_H: Tensor | None = None


class Attend(Protocol):
    """How queries meet keys and values: `o_THU = attend(layer, q_THC, k_TJC, v_TJU)`."""

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245). Query, key and value weights are one matrix,
    in that order, since small products cost their launch more than their arithmetic."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.scale, self.window = layer, config.scale, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        columns = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, columns, config.qkv_bias)
        self.o_proj = Linear(config.heads * config.head_dim, config.hidden_size, config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None

    def forward(self, x_TD: Tensor, cos_T1c: Tensor, sin_T1c: Tensor, attend: Attend) -> Tensor:
        tokens = x_TD.shape[0]
        turned = self.heads + self.kv_heads
        qkv_TNC = self.qkv_proj(x_TD).view(tokens, turned + self.kv_heads, self.head_dim)
        v_TJC = qkv_TNC[:, turned:]
        qk_TNC = self._normed_and_turned(qkv_TNC, cos_T1c, sin_T1c)
        q_THC, k_TJC = qk_TNC[:, : self.heads], qk_TNC[:, self.heads :]
        layer = AttentionLayer(self.layer, self.scale, self.window, self.sinks)
        out_TD: Tensor = self.o_proj(attend(layer, q_THC, k_TJC, v_TJC).reshape(tokens, -1))
        return out_TD

    def _normed_and_turned(self, qkv_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        """Query heads, then key heads."""
        turned = self.heads + self.kv_heads
        qk_TNC = qkv_TNC[:, :turned]
        if library.usable(qkv_TNC):
            norms = None
            if self.q_norm is not None and self.k_norm is not None:
                norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            operations.norm_and_turn_(qkv_TNC, norms, cos_T1c, sin_T1c, self.heads, self.kv_heads)
            return qk_TNC
        if self.q_norm is not None and self.k_norm is not None:
            # Queries and keys at once, each head with its kind's scale: small operations cost their launch.
            scales = [self.q_norm.weight.expand(self.heads, -1), self.k_norm.weight.expand(self.kv_heads, -1)]
            qk_TNC = rms_norm(qk_TNC, torch.cat(scales), self.q_norm.eps)
        return rotate(qk_TNC, cos_T1c, sin_T1c)


# What DeepSeek's release and transformers norm latents with, whatever rms_norm_eps says.
_LATENT_NORM_EPS = 1e-6


class LatentAttentionBlock(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, eq. 9-19), keys and values expanded per head."""

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
        kv_THC = self.kv_b_proj(self.kv_a_norm(kv_TD)).view(tokens, self.heads, -1)
        k_nope_THC, v_THU = kv_THC.split([latent.nope_dim, latent.value_dim], -1)
        turned_TNC = rotate(torch.cat([q_rope_THC, k_rope_TC.unsqueeze(1)], 1), cos_T1c, sin_T1c)
        q_THC = torch.cat([q_nope_THC, turned_TNC[:, :-1]], -1)
        k_THC = torch.cat([k_nope_THC, turned_TNC[:, -1:].expand(-1, self.heads, -1)], -1)
        layer = AttentionLayer(self.layer, self.scale, self.window)
        out_TD: Tensor = self.o_proj(attend(layer, q_THC, k_THC, v_THU).reshape(tokens, -1))
        return out_TD
