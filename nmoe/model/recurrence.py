"""Gated DeltaNet: linear attention that keeps one memory for a sequence, where attention keeps every key (Yang et al. 2024,
arXiv:2412.06464), as in Qwen3-Next.

A layer is a short causal convolution and the gated delta rule, from a state to a state. Learner and engine run the same code over
packed sequences. In training a sequence starts from an empty state; in the engine a part of a prompt, or one token, continues from
the sequence's state. No value crosses from one sequence to another.
"""

# Shapes: T packed tokens, D width, S sequences, B sequences of a bucket and L its longest, W channels of the convolution (queries,
# keys and values together), K its tokens, V all values, H value heads, G key heads, C key width, U value width.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from nmoe.model.config import DeltaNet, ModelConfig
from nmoe.model.device import put
from nmoe.model.layers import Attend, Linear, RMSNorm
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.ops.table import ops_for
from nmoe.parallel.ranks import keep_part

# A bucket ends at the first sequence shorter than this share of its longest one. The scan then takes at most twice as many steps as
# the longest sequence alone, and at most half of the tokens are padding.
_BUCKET_SHARE = 0.5
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class RecurrentLayer:
    """The parameters of a recurrent layer: its index in the model, its shape, and the convolution's weights `[W, K]`."""

    index: int
    delta: DeltaNet
    conv_WK: Tensor


@dataclass(frozen=True)
class RecurrentState:
    """The states of sequences in one layer: the convolution's last K - 1 inputs, `[S, K - 1, W]`, and the memories of the delta
    rule, `[S, H, C, U]`, in fp32 (in fp64 if the model is in fp64)."""

    inputs_SKW: Tensor
    memory_SHCU: Tensor


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the memories of a model in `dtype`: fp32, or wider if the model's is."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Bucket:
    """Sequences of similar length: the sequences' indices, and the indices of their tokens in the pack, padded with T."""

    sequences_B: Tensor
    rows_BL: Tensor


class Spans:
    """Where each sequence lies in the pack, given the lengths, and the indices for running a recurrent layer. No sequence may be
    empty."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.device, self.count, self.tokens = device, len(lengths), int(self.lengths.sum())
        self.first = np.cumsum(self.lengths) - self.lengths
        self._taps: dict[int, tuple[Tensor, Tensor]] = {}
        order, index = np.argsort(-self.lengths, kind="stable"), np.zeros(self.tokens, dtype=np.int64)
        self.buckets: list[_Bucket] = []
        done = 0
        while len(order):
            longest = int(self.lengths[order[0]])
            size = int((self.lengths[order] >= _BUCKET_SHARE * longest).sum())
            own, order = order[:size], order[size:]
            at_L = np.arange(longest)
            inside_BL = at_L < self.lengths[own][:, None]
            rows_BL = np.where(inside_BL, self.first[own][:, None] + at_L, self.tokens)
            index[rows_BL[inside_BL]] = done + inside_BL.reshape(-1).nonzero()[0]
            done += rows_BL.size
            self.buckets.append(_Bucket(put(own, device), put(rows_BL, device)))
        self.index_T = put(index, device)

    def taps(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Returns indices for a convolution over `tokens` tokens: the row that each tap reads for each token, `[K, T]`, and the
        rows that become each sequence's state, its last inputs, `[S, K - 1]`. The rows indexed are the S * (K - 1) earlier inputs
        of the sequences, then the T new ones."""
        if tokens not in self._taps:
            earlier, own = tokens - 1, self.count * (tokens - 1)
            sequence_T = np.repeat(np.arange(self.count), self.lengths)
            position_T = np.arange(self.tokens) - self.first[sequence_T]

            def row(sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
                before = sequence * earlier + position + earlier
                return np.where(position < 0, before, own + self.first[sequence] + position)

            taps_KT = row(sequence_T[None], position_T[None] + np.arange(-earlier, 1)[:, None])
            last_SK = row(np.arange(self.count)[:, None], self.lengths[:, None] + np.arange(-earlier, 0))
            self._taps[tokens] = put(taps_KT, self.device), put(last_SK, self.device)
        return self._taps[tokens]


def run(
    layer: RecurrentLayer,
    spans: Spans,
    x_TW: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    state: RecurrentState | None,
    exact: bool,
) -> tuple[Tensor, RecurrentState]:
    """Runs a recurrent layer over packed sequences. Returns each token's output, `[T, H, U]`, and the sequences' states after their
    last token. `x_TW` holds queries, keys and values before the convolution; `decay_TH` is the log of the memory's decay, `beta_TH`
    the strength of writing. `state` is None for sequences that start here."""
    delta, ops = layer.delta, ops_for(x_TW, exact)
    wide = memory_dtype(x_TW.dtype)
    if state is None:
        inputs_SKW = x_TW.new_zeros(spans.count, delta.conv_tokens - 1, x_TW.shape[1])
        state = RecurrentState(inputs_SKW, _nothing(delta, spans, wide))
    taps_KT, last_SK = spans.taps(delta.conv_tokens)
    rows_RW = torch.cat([state.inputs_SKW.to(x_TW.dtype).flatten(0, 1), x_TW])
    mixed_TW = rows_RW.index_select(0, taps_KT[0]) * layer.conv_WK[:, 0]
    for tap in range(1, delta.conv_tokens):
        mixed_TW = mixed_TW + rows_RW.index_select(0, taps_KT[tap]) * layer.conv_WK[:, tap]
    mixed_TW = ops.silu(mixed_TW)
    keys, repeats = delta.key_heads * delta.key_dim, delta.value_heads // delta.key_heads
    q_TGC, k_TGC = (
        _normed(x_TV.unflatten(1, (delta.key_heads, -1)).to(wide))
        for x_TV in (mixed_TW[:, :keys], mixed_TW[:, keys : 2 * keys])
    )
    q_THC = (q_TGC * delta.key_dim**-0.5).repeat_interleave(repeats, 1)
    k_THC = k_TGC.repeat_interleave(repeats, 1)
    v_THU = mixed_TW[:, 2 * keys :].unflatten(1, (delta.value_heads, -1)).to(wide)
    tokens = [q_THC, k_THC, v_THU, decay_TH.to(wide), beta_TH.to(wide)]
    # One row more, of zeros, which pads: it leaves a memory as it is.
    tokens = [torch.cat([x_T, x_T.new_zeros(1, *x_T.shape[1:])]) for x_T in tokens]
    out, memories = [], torch.empty_like(state.memory_SHCU)
    for bucket in spans.buckets:
        rows_BL = bucket.rows_BL
        padded = (x_T.index_select(0, rows_BL.flatten()).unflatten(0, rows_BL.shape) for x_T in tokens)
        q_BLHC, k_BLHC, v_BLHU, decay_BLH, beta_BLH = padded
        begin_BHCU = state.memory_SHCU.index_select(0, bucket.sequences_B)
        out_BLHU, end_BHCU = ops.delta_rule(q_BLHC, k_BLHC, v_BLHU, decay_BLH, beta_BLH, begin_BHCU)
        out.append(out_BLHU.flatten(0, 1))
        memories = memories.index_copy(0, bucket.sequences_B, end_BHCU)
    out_THU = torch.cat(out).index_select(0, spans.index_T).to(x_TW.dtype)
    inputs_SKW = rows_RW.index_select(0, last_SK.flatten()).unflatten(0, last_SK.shape)
    return out_THU, RecurrentState(inputs_SKW, memories)


def _nothing(delta: DeltaNet, spans: Spans, dtype: torch.dtype) -> Tensor:
    return torch.zeros(spans.count, delta.value_heads, delta.key_dim, delta.value_dim, dtype=dtype, device=spans.device)


def _normed(x_TGC: Tensor) -> Tensor:
    """Scales rows to length one."""
    return x_TGC * ((x_TGC * x_TGC).sum(-1, keepdim=True) + _NORM_EPS).rsqrt()


@runtime_checkable
class RecurrentAttend(Protocol):
    """An `Attend` that also runs recurrent layers: it knows which tokens follow each other, and their sequences' states."""

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor: ...

    def recur(self, layer: RecurrentLayer, x_TW: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
        """Returns the recurrent layer's output for each token, `[T, H, U]`, as `run` computes it."""


class GatedDeltaNet(nn.Module):
    """A recurrent layer that replaces attention. The rows of `in_proj` are queries, keys, values and output gates, each head by
    head; the rows of `gate_proj` are write strengths and decays. It needs no rotary embedding: convolution and decay distinguish
    positions."""

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
        """Draws decay rates between 0.01 and 16, as Qwen3-Next's release does, and sets decay biases and the norm's scale to
        one."""
        rates = torch.empty(self.decay_log.shape).uniform_(0.01, 16, generator=generator)
        keep_part(self.decay_log, rates.log())
        self.decay_bias.fill_(1.0)
        self.norm.weight.fill_(1.0)
