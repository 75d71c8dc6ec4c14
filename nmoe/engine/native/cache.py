"""The key-value cache: one row of `context` positions per running sequence, running rows always first.

Rows are dense so that on a CPU decode attention reads keys and values in place: gathering 256 sequences of 160 tokens out of
blocks moves 168 MB a step for four small layers, more than the step's arithmetic. When a sequence ends, the last row moves into
its place. What else belongs to a position (recorded routes) lies beside the keys and moves with them.
"""

# Shapes: S rows, J key-value heads, P positions a row holds, C head width, Y layers, K chosen experts, B running rows,
# L positions in use.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmoe.model.attention import AttentionLayer
from nmoe.model.config import ModelConfig
from nmoe.model.packed import PackedAttention


class KVCache:
    """Keys and values `[Y, S, J, P, C]` and routes `[S, P, Y, K]`. Decode attention computes in the cache's `dtype`."""

    def __init__(self, config: ModelConfig, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rows, self.positions = rows, config.context_tokens
        shape = (config.layers, rows, config.kv_heads, self.positions, config.head_dim)
        # Zeros, not empty: a masked position has weight 0, and 0 times a stray NaN would be NaN.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros((*shape[:-1], config.value_dim), device=device, dtype=dtype)
        self.routes: Tensor | None = None
        if config.experts:
            self.routes = torch.zeros(
                rows, self.positions, len(config.moe_layers), config.experts_per_token, dtype=torch.int16, device=device
            )
        self._flat_keys = self.keys.view(config.layers, -1, config.head_dim)
        self._flat_values = self.values.view(config.layers, -1, config.value_dim)
        self._first_row_SJ = (
            torch.arange(rows * config.kv_heads, device=device).view(rows, config.kv_heads) * self.positions
        )

    def places(self, positions_B: Tensor) -> Tensor:
        """Where the key of each running row at its position lies in a layer's flat cache, `[B * J]`."""
        return (self._first_row_SJ[: positions_B.shape[0]] + positions_B.unsqueeze(-1)).reshape(-1)

    def write(self, layer: int, places: Tensor, k_BJC: Tensor, v_BJC: Tensor) -> None:
        dtype = self.keys.dtype
        self._flat_keys[layer].index_copy_(0, places, k_BJC.reshape(-1, k_BJC.shape[-1]).to(dtype))
        self._flat_values[layer].index_copy_(0, places, v_BJC.reshape(-1, v_BJC.shape[-1]).to(dtype))

    def write_routes(self, positions_B: Tensor, routes_BYK: Tensor) -> None:
        if self.routes is not None:
            rows = torch.arange(positions_B.shape[0], device=positions_B.device)
            self.routes[rows, positions_B] = routes_BYK

    def fill(self, rows: slice, keys_YJLC: Tensor, values_YJLC: Tensor, routes_LYK: Tensor | None) -> None:
        """Gives the same first L positions to each of `rows`: the samples of a prompt share one prefill."""
        length = keys_YJLC.shape[2]
        self.keys[:, rows, :, :length] = keys_YJLC.unsqueeze(1)
        self.values[:, rows, :, :length] = values_YJLC.unsqueeze(1)
        if self.routes is not None and routes_LYK is not None:
            self.routes[rows, :length] = routes_LYK

    def move(self, targets: Tensor, sources: Tensor, length: int) -> None:
        """Copies the first `length` positions of rows `sources` onto rows `targets`."""
        self.keys[:, targets, :, :length] = self.keys[:, sources, :, :length]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]
        if self.routes is not None:
            self.routes[targets, :length] = self.routes[sources, :length]


class PrefillAttention:
    """Attention within packed prompts that also keeps each layer's keys and values, `[T, J, C]`, for the cache."""

    def __init__(self, lengths: Sequence[int], device: torch.device, exact: bool) -> None:
        self.packed = PackedAttention(lengths, device, exact)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJC: Tensor) -> Tensor:
        self.keys.append(k_TJC)
        self.values.append(v_TJC)
        return self.packed(layer, q_THC, k_TJC, v_TJC)


class DecodeAttention:
    """One query per running row against its cached positions."""

    def __init__(self, cache: KVCache, positions_B: Tensor, longest: int) -> None:
        self.cache = cache
        self.places = cache.places(positions_B)
        self.longest = longest
        allowed_BL = torch.arange(longest, device=positions_B.device) <= positions_B.unsqueeze(-1)
        mask_BL = torch.zeros(allowed_BL.shape, device=positions_B.device, dtype=cache.keys.dtype)
        self.mask_BL = mask_BL.masked_fill_(~allowed_BL, float("-inf"))
        self.age_BL = positions_B.unsqueeze(-1) - torch.arange(longest, device=positions_B.device)

    def __call__(self, layer: AttentionLayer, q_BHC: Tensor, k_BJC: Tensor, v_BJC: Tensor) -> Tensor:
        self.cache.write(layer.index, self.places, k_BJC, v_BJC)
        b, heads, width = q_BHC.shape
        kv_heads = k_BJC.shape[1]
        # Running rows come first, so these are views: batch and head collapse to one axis without a copy.
        k_NLC = self.cache.keys[layer.index, :b, :, : self.longest].reshape(b * kv_heads, self.longest, -1)
        v_NLC = self.cache.values[layer.index, :b, :, : self.longest].reshape(b * kv_heads, self.longest, -1)
        q_NGC = q_BHC.reshape(b * kv_heads, heads // kv_heads, width).to(k_NLC.dtype)
        scores_NGL = torch.bmm(q_NGC, k_NLC.transpose(1, 2)).mul_(layer.scale)
        scores_BHL = scores_NGL.view(b, heads, self.longest).add_(self.mask_BL.unsqueeze(1))
        if layer.window:
            scores_BHL.masked_fill_((self.age_BL >= layer.window).unsqueeze(1), float("-inf"))
        if layer.sinks_H is None:
            weights_BHL = scores_BHL.softmax(-1)
        else:
            sinks_BH1 = layer.sinks_H.to(scores_BHL.dtype).view(1, -1, 1).expand(b, -1, -1)
            weights_BHL = torch.cat([scores_BHL, sinks_BH1], -1).softmax(-1)[..., :-1]
        return torch.bmm(weights_BHL.reshape(scores_NGL.shape), v_NLC).view(b, heads, -1).to(q_BHC.dtype)
