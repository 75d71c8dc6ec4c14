"""Grouped-query attention: projections, QK-norm and rotary embedding, with the attending itself left to the caller.

The learner attends within packed sequences, the engine attends to a cache: each hands in an `Attend`. Everything else
is the same code and the same weights, which is what keeps sampler and learner from drifting apart.
"""

# Shapes: T tokens, D width, H query heads, J key-value heads, C head width.

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from nmoe.model.config import ModelConfig
from nmoe.model.norm import RMSNorm
from nmoe.model.numerics import linear
from nmoe.model.rope import rotate


class Attend(Protocol):
    """How queries meet keys and values: `o_THC = attend(layer, q_THC, k_TJC, v_TJC)`."""

    def __call__(self, layer: int, q_THC: Tensor, k_TJC: Tensor, v_TJC: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245). Query, key and value weights are one matrix,
    in that order, since small products cost their launch more than their arithmetic."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.exact = False
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.qkv_proj = nn.Linear(
            config.hidden_size, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False
        )
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_TD: Tensor, cos_T1c: Tensor, sin_T1c: Tensor, attend: Attend) -> Tensor:
        tokens = x_TD.shape[0]
        turned = self.heads + self.kv_heads
        qkv_TNC = linear(x_TD, self.qkv_proj.weight, self.exact).view(tokens, turned + self.kv_heads, self.head_dim)
        v_TJC = qkv_TNC[:, turned:]
        if self.q_norm is None or self.k_norm is None:
            qk_TNC = rotate(qkv_TNC[:, :turned], cos_T1c, sin_T1c)
            q_THC, k_TJC = qk_TNC[:, : self.heads], qk_TNC[:, self.heads :]
        else:
            q_THC = rotate(self.q_norm(qkv_TNC[:, : self.heads]), cos_T1c, sin_T1c)
            k_TJC = rotate(self.k_norm(qkv_TNC[:, self.heads : turned]), cos_T1c, sin_T1c)
        o_THC = attend(self.layer, q_THC, k_TJC, v_TJC)
        return linear(o_THC.reshape(tokens, -1), self.o_proj.weight, self.exact)
