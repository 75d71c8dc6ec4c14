"""What the layers of one kind keep of sequences: a class per kind, behind one interface.

They keep something of every position, in blocks that sequences hold through block tables and share. Which blocks a sequence holds
is decided without knowing the kinds (`block_manager`).
"""

# Shapes: N blocks, Y layers, J key-value heads, P positions of a block, C key width, U value width, K chosen experts, T tokens.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmoe.model.config import ModelConfig
from nmoe.model.device import put

# Positions of a block. A smaller block shares more of a common prefix and wastes less at a sequence's end; a larger one makes fewer
# pieces to gather. 8, 16 and 32 decode equally fast on two CPU cores.
BLOCK_TOKENS = 16


class LayerCache(Protocol):
    """What the layers of one kind keep. Writing and reading are the kind's own, as its attention is."""

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        """What all layers of the kind keep of a block's positions."""

    def copy(self, sources_N: Tensor, targets_N: Tensor) -> None:
        """Copies whole blocks: a sequence that shares a prompt goes on in a copy of its last block."""

    def clear(self, blocks: int) -> None:
        """Sets the first `blocks` blocks to zero."""


class KeyValueCache:
    """Keys `[Y, N, J, P, C]` and values `[Y, N, J, P, U]` of the layers that attend. A window reads the last of them."""

    def __init__(self, config: ModelConfig, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        self.kv_heads, width, value_width = self.shape(config)
        self.device, self.dtype = device, dtype
        layers = config.layers
        shape = (layers, blocks, self.kv_heads, BLOCK_TOKENS)
        self.keys = zeros((*shape, width), device, dtype)
        self.values = zeros((*shape, value_width), device, dtype)
        # The same memory with one row per position of a head, and with one row per block of a head.
        rows, whole = blocks * self.kv_heads * BLOCK_TOKENS, blocks * self.kv_heads
        self._key_rows = self.keys.view(layers, rows, width)
        self._value_rows = self.values.view(layers, rows, value_width)
        self._key_blocks = self.keys.view(layers, whole, BLOCK_TOKENS * width)
        self._value_blocks = self.values.view(layers, whole, BLOCK_TOKENS * value_width)

    @staticmethod
    def shape(config: ModelConfig) -> tuple[int, int, int]:
        """Heads, key width and value width."""
        return config.kv_heads, config.head_dim, config.value_dim

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        heads, width, value_width = cls.shape(config)
        return config.layers * heads * BLOCK_TOKENS * (width + value_width) * dtype.itemsize

    def places(self, blocks_T: NDArray[np.int64], positions_T: NDArray[np.int64]) -> Tensor:
        """The index of each token's key per head, `[T * J]`, for `write`; `blocks_T` is the block of its position."""
        heads = blocks_T[:, None] * self.kv_heads + np.arange(self.kv_heads)
        return put((heads * BLOCK_TOKENS + positions_T[:, None] % BLOCK_TOKENS).reshape(-1), self.device)

    def write(self, layer: int, places: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> None:
        """Stores keys and values at the places that `places` gave."""
        k, v = k_TJC.to(self.dtype), v_TJU.to(self.dtype)
        self._key_rows[layer].index_copy_(0, places, k.reshape(-1, k.shape[-1]))
        self._value_rows[layer].index_copy_(0, places, v.reshape(-1, v.shape[-1]))

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
        v = self._value_blocks[layer].index_select(0, index).view(heads, -1, self.values.shape[-1])
        return k, v

    def copy(self, sources_N: Tensor, targets_N: Tensor) -> None:
        for tensor in (self.keys, self.values):
            tensor.index_copy_(1, targets_N, tensor.index_select(1, sources_N))

    def clear(self, blocks: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[:, :blocks].zero_()


class LatentCache(KeyValueCache):
    """Latents of the layers with latent attention, side by side with the rotated key that all heads share, as the keys of one head;
    their first part is its values. In DeepSeek-V3 these are 576 numbers per layer, and keys and values would be 40,960."""

    def __init__(self, config: ModelConfig, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, blocks, device, dtype)
        assert config.latent is not None, "the caller looks"
        self.kv_rank = config.latent.kv_rank

    @staticmethod
    def shape(config: ModelConfig) -> tuple[int, int, int]:
        assert config.latent is not None, "the caller looks"
        return 1, config.latent.kv_rank + config.latent.rope_dim, 0

    def write_latents(self, layer: int, places: Tensor, rows_TC: Tensor) -> None:
        """Stores latents and shared keys, side by side."""
        self._key_rows[layer].index_copy_(0, places, rows_TC.to(self.dtype))

    def gather(self, layer: int, index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        k = self._key_blocks[layer].index_select(0, index).view(rows, -1, self.keys.shape[-1])
        return k, k[..., : self.kv_rank]


class RouteCache:
    """The router picks of each position, int16 `[N * P, Y, K]`, of the layers with experts."""

    def __init__(self, config: ModelConfig, blocks: int, device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        picks = (blocks * BLOCK_TOKENS, len(config.moe_layers), config.experts_per_token)
        self.picks = zeros(picks, device, torch.int16)

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        return len(config.moe_layers) * config.experts_per_token * BLOCK_TOKENS * 2

    def write(self, blocks_T: NDArray[np.int64], positions_T: NDArray[np.int64], routes_TYK: Tensor) -> None:
        """Stores the router picks of tokens at their positions."""
        slots_T = put(blocks_T * BLOCK_TOKENS + positions_T % BLOCK_TOKENS, self.device)
        self.picks.index_copy_(0, slots_T, routes_TYK)

    def read(self, blocks: Sequence[int], positions: int) -> Tensor:
        """The router picks of a sequence's first positions, `[positions, Y, K]`."""
        wanted = put(blocks, self.device)
        routes = self.picks.view(self.blocks, BLOCK_TOKENS, *self.picks.shape[1:]).index_select(0, wanted)
        return routes.flatten(0, 1)[:positions]

    def copy(self, sources_N: Tensor, targets_N: Tensor) -> None:
        blocks = self.picks.view(self.blocks, -1)
        blocks.index_copy_(0, targets_N, blocks.index_select(0, sources_N))

    def clear(self, blocks: int) -> None:
        """Does nothing: no pick is a number that others are computed with."""


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros, since a masked position has weight 0, and 0 times a stray NaN would be NaN. On a CPU the system hands out
    pages as they are first written, so that a generous budget costs only what is used."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, device=device, dtype=dtype)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
