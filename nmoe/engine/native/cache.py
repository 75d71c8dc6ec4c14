"""The paged key-value cache: blocks of positions that sequences hold through block tables, and share if their tokens are the same.

For latent attention it holds what keys and values are made from: a position's latent and the rotated key that all heads share. In
DeepSeek-V3 these are 576 numbers per layer, and keys and values would be 40,960.
"""

# Shapes: N blocks, Y layers, J key-value heads, P positions of a block, C key width, U value width, K chosen experts, T tokens.

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.device import put

# Positions of a block. A smaller block shares more of a common prefix and wastes less at a sequence's end; a larger one makes fewer
# pieces to gather. 8, 16 and 32 decode equally fast on two CPU cores.
BLOCK_TOKENS = 16


def cache_blocks(config: ModelConfig, dtype: torch.dtype, max_sequences: int, cache_bytes: int, most_bytes: int) -> int:
    """How many blocks a cache of `cache_bytes` has; with 0, as many as `max_sequences` can fill at the model's full context, up to
    `most_bytes`. Raises UserError if there is not room for one."""
    size = bytes_per_block(config, dtype)
    # One block more per sequence, for its copy of the last block of a prompt that it shares.
    wanted = max_sequences * (-(-config.context_tokens // BLOCK_TOKENS) + 1)
    blocks = cache_bytes // size if cache_bytes else min(wanted, most_bytes // size)
    if blocks < 1:
        given = cache_bytes or most_bytes
        raise UserError(f"a cache of {given} bytes holds not even one block of this model ({size} bytes)")
    return blocks


def bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
    """The size of one block: keys, values and routes together."""
    heads, width, value_width = _shape(config)
    numbers = config.layers * heads * BLOCK_TOKENS * (width + value_width)
    routes = len(config.moe_layers) * config.experts_per_token * BLOCK_TOKENS
    return numbers * dtype.itemsize + routes * 2


def _shape(config: ModelConfig) -> tuple[int, int, int]:
    """Heads, key width and value width of the cache. Latents are stored as the keys of one head; their first part is its values."""
    if config.latent is not None:
        return 1, config.latent.kv_rank + config.latent.rope_dim, 0
    return config.kv_heads, config.head_dim, config.value_dim


class PagedCache:
    """Keys `[Y, N, J, P, C]`, values `[Y, N, J, P, U]`, and the router picks of each position, int16 `[N * P, Y, K]`.

    Decode attention computes in the cache's `dtype`.
    """

    def __init__(self, config: ModelConfig, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        self.kv_heads, width, value_width = _shape(config)
        self.blocks, self.device, self.dtype = blocks, device, dtype
        shape = (config.layers, blocks, self.kv_heads, BLOCK_TOKENS)
        self.latent = config.latent
        self.keys = _zeros((*shape, width), device, dtype)
        self.values = _zeros((*shape, value_width), device, dtype)
        self.routes: Tensor | None = None
        if config.routed_experts:
            picks = (blocks * BLOCK_TOKENS, len(config.moe_layers), config.experts_per_token)
            self.routes = _zeros(picks, device, torch.int16)
        # The same memory with one row per position of a head, and with one row per block of a head.
        rows, whole = blocks * self.kv_heads * BLOCK_TOKENS, blocks * self.kv_heads
        self._key_rows = self.keys.view(config.layers, rows, width)
        self._value_rows = self.values.view(config.layers, rows, value_width)
        self._key_blocks = self.keys.view(config.layers, whole, BLOCK_TOKENS * width)
        self._value_blocks = self.values.view(config.layers, whole, BLOCK_TOKENS * value_width)

    def places(self, blocks_T: NDArray[np.int64], positions_T: NDArray[np.int64]) -> Tensor:
        """The index of each token's key per head, `[T * J]`, for `write`; `blocks_T` is the block of its position."""
        heads = blocks_T[:, None] * self.kv_heads + np.arange(self.kv_heads)
        return put((heads * BLOCK_TOKENS + positions_T[:, None] % BLOCK_TOKENS).reshape(-1), self.device)

    def write(self, layer: int, places: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> None:
        """Stores keys and values at the places that `places` gave."""
        k, v = k_TJC.to(self.dtype), v_TJU.to(self.dtype)
        self._key_rows[layer].index_copy_(0, places, k.reshape(-1, k.shape[-1]))
        self._value_rows[layer].index_copy_(0, places, v.reshape(-1, v.shape[-1]))

    def write_latents(self, layer: int, places: Tensor, rows_TC: Tensor) -> None:
        """Stores latents and shared keys of latent attention, side by side."""
        self._key_rows[layer].index_copy_(0, places, rows_TC.to(self.dtype))

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys `[N, J, P, C]` and values `[N, J, P, U]`."""
        return self.keys[layer], self.values[layer]

    def gather_index(self, table_BM: NDArray[np.int64]) -> Tensor:
        """The index for `gather` of sequences with these block tables."""
        heads = table_BM[:, None, :] * self.kv_heads + np.arange(self.kv_heads)[None, :, None]
        return put(heads.reshape(-1), self.device)

    def gather(self, layer: int, index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys `[rows * J, M * P, C]` and values `[rows * J, M * P, U]` in the order of positions."""
        heads = rows * self.kv_heads
        k = self._key_blocks[layer].index_select(0, index).view(heads, -1, self.keys.shape[-1])
        if self.latent is not None:
            return k, k[..., : self.latent.kv_rank]
        v = self._value_blocks[layer].index_select(0, index).view(heads, -1, self.values.shape[-1])
        return k, v

    def write_routes(self, blocks_T: NDArray[np.int64], positions_T: NDArray[np.int64], routes_TYK: Tensor) -> None:
        """Stores the router picks of tokens at their positions."""
        if self.routes is not None:
            slots_T = put(blocks_T * BLOCK_TOKENS + positions_T % BLOCK_TOKENS, self.device)
            self.routes.index_copy_(0, slots_T, routes_TYK)

    def read_routes(self, blocks: Sequence[int], positions: int) -> Tensor | None:
        """The router picks of a sequence's first positions, `[positions, Y, K]`; None in a dense model."""
        if self.routes is None:
            return None
        wanted = put(blocks, self.device)
        routes = self.routes.view(self.blocks, BLOCK_TOKENS, *self.routes.shape[1:]).index_select(0, wanted)
        return routes.flatten(0, 1)[:positions]

    def clear(self, blocks: int) -> None:
        """Sets the first `blocks` blocks to zero."""
        for tensor in (self.keys, self.values):
            tensor[:, :blocks].zero_()

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole blocks, keys, values and routes."""
        source, target = (put(blocks, self.device) for blocks in (sources, targets))
        for tensor in (self.keys, self.values):
            tensor.index_copy_(1, target, tensor.index_select(1, source))
        if self.routes is not None:
            blocks = self.routes.view(self.blocks, -1)
            blocks.index_copy_(0, target, blocks.index_select(0, source))


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros, since a masked position has weight 0, and 0 times a stray NaN would be NaN. On a CPU the system hands out
    pages as they are first written, so that a generous budget costs only what is used."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, device=device, dtype=dtype)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
