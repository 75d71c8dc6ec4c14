"""Gated DeltaNet: linear attention that keeps one memory for a sequence, where attention keeps every key (Yang et al. 2024,
arXiv:2412.06464), as in Qwen3-Next."""

# Shapes: T tokens, D width, W channels of the convolution (queries, keys and values together), V all values, H value heads, U value
# width.

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from nmoe.model.attention import Attend
from nmoe.model.config import ModelConfig
from nmoe.model.linear import Linear, RMSNorm
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.ops.table import ops_for
from nmoe.model.recurrence import RecurrentLayer
from nmoe.parallel.ranks import keep_part


@runtime_checkable
class RecurrentAttend(Protocol):
    """An `Attend` that runs recurrent layers, too: it knows which tokens follow each other, and where their sequences stand."""

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor: ...

    def recur(self, layer: RecurrentLayer, x_TW: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
        """What each token reads, `[T, H, U]`: `nmoe.model.recurrence.run`."""


class GatedDeltaNet(nn.Module):
    """A layer in the place of attention. The rows of `in_proj` are queries, keys, values and output gates, each head by head, those
    of `gate_proj` strengths and decays. No rotary turn: the convolution and the decay tell positions apart."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.delta is not None, "the caller looks"
        delta = self.delta = config.delta
        self.layer, self.exact = layer, False
        self.in_proj = Linear(config.hidden_size, delta.channels + delta.values)
        self.gate_proj = Linear(config.hidden_size, 2 * delta.value_heads)
        self.conv = nn.Parameter(torch.empty(delta.channels, delta.conv_tokens))
        self.decay_log = nn.Parameter(torch.zeros(delta.value_heads))
        self.decay_bias = nn.Parameter(torch.ones(delta.value_heads))
        self.norm = RMSNorm(delta.value_dim, config.norm_eps)
        self.o_proj = Linear(delta.values, config.hidden_size)

    def forward(self, x_TD: Tensor, cos_T1c: Tensor, sin_T1c: Tensor, attend: Attend) -> Tensor:
        assert isinstance(attend, RecurrentAttend), "an `Attend` of a model with recurrent layers"
        ops = ops_for(x_TD, self.exact)
        x_TW, gate_TV = self.in_proj(x_TD).split([self.delta.channels, self.delta.values], -1)
        strength_TH, rate_TH = self.gate_proj(x_TD).chunk(2, -1)
        rate_TH = ops.softplus(rate_TH.float() + self.decay_bias.float())
        decay_TH = rate_TH * -self.decay_log.float().exp()
        layer = RecurrentLayer(self.layer, self.delta, self.conv)
        o_THU = self.norm(attend.recur(layer, x_TW, decay_TH, ops.sigmoid(strength_TH)))
        gate_THU = ops.silu(gate_TV.float()).view(o_THU.shape)
        out_TD: Tensor = self.o_proj((o_THU * gate_THU).to(x_TD.dtype).flatten(1))
        return out_TD

    @torch.no_grad()
    def initialize_decay(self, generator: torch.Generator) -> None:
        """Draws decay rates between 0.01 and 16, as the release does, and sets their bias to one and the norm's scale to one."""
        rates = torch.empty(self.decay_log.shape).uniform_(0.01, 16, generator=generator)
        keep_part(self.decay_log, rates.log())
        self.decay_bias.fill_(1.0)
        self.norm.weight.fill_(1.0)
