"""The engine's cache: the keys and values, router picks and states that a model's layers keep of sequences.

Most layers keep something for every position, in blocks, which block tables assign to sequences and which sequences can share. A
recurrent layer keeps one state for each sequence instead, in a state slot. The block manager (`block_manager`) decides which blocks
and which state slot a sequence holds, independently of their content.
"""

# Shapes: N blocks, S state slots, B sequences, Y layers, J key-value heads, P positions of a block, C key width, U value width, K
# chosen experts (of a state: tokens of the convolution), W its channels, H heads, T tokens.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.device import put
from nmoe.model.recurrence import RecurrentState, memory_dtype

# Positions of a block. A smaller block shares more of a common prefix and wastes less at a sequence's end; a larger one makes fewer
# pieces to gather. 8, 16 and 32 decode equally fast on two CPU cores.
BLOCK_TOKENS = 16


class LayerCache(Protocol):
    """The cache of the layers of one kind: attention, latent attention, experts or recurrence. Each class defines its writing and
    reading.

    Sequences that share a prompt go on in a copy of its last block, and of its state. Blocks are zero at first and after
    `clear`, since masked positions are read; a state slot is read only by the sequence that has written it.
    """

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        """Returns the bytes that all these layers together keep for the positions of one block."""

    @classmethod
    def bytes_per_state_slot(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        """Returns the bytes that all these layers together keep for a whole sequence."""

    def copy_blocks(self, sources_N: Tensor, targets_N: Tensor) -> None: ...

    def copy_state_slots(self, sources_S: Tensor, targets_S: Tensor) -> None: ...

    def clear(self, blocks: int) -> None:
        """Sets the first `blocks` blocks to zero."""


class _InBlocks:
    """The base class of caches that keep everything in blocks and have no states."""

    @classmethod
    def bytes_per_state_slot(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        return 0

    def copy_state_slots(self, sources_S: Tensor, targets_S: Tensor) -> None:
        """Does nothing, because there are no states."""


class KeyValueCache(_InBlocks):
    """The keys and values of the attention layers: tensors of layers x blocks x key-value heads x positions of a block x width,
    `[Y, N, J, P, C]` and `[Y, N, J, P, U]`. A layer with a window keeps all positions, too, and reads only the last ones."""

    def __init__(self, config: ModelConfig, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        self.kv_heads, width, value_width = self.shape(config)
        self.device, self.dtype = device, dtype
        layers = len(config.attention_layers)
        self.rows = {layer: row for row, layer in enumerate(config.attention_layers)}
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
        """Returns the number of key-value heads, the key width and the value width."""
        return config.kv_heads, config.head_dim, config.value_dim

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        heads, width, value_width = cls.shape(config)
        return len(config.attention_layers) * heads * BLOCK_TOKENS * (width + value_width) * dtype.itemsize

    def key_index(self, blocks_T: NDArray[np.int64], positions_T: NDArray[np.int64]) -> Tensor:
        """Returns the index of each token's key per head, `[T * J]`, for `write`. `blocks_T` is the block of each token's
        position."""
        heads = blocks_T[:, None] * self.kv_heads + np.arange(self.kv_heads)
        return put((heads * BLOCK_TOKENS + positions_T[:, None] % BLOCK_TOKENS).reshape(-1), self.device)

    def write(self, layer: int, index: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> None:
        """Stores keys and values at the index that `key_index` gave."""
        k, v, row = k_TJC.to(self.dtype), v_TJU.to(self.dtype), self.rows[layer]
        self._key_rows[row].index_copy_(0, index, k.reshape(-1, k.shape[-1]))
        self._value_rows[row].index_copy_(0, index, v.reshape(-1, v.shape[-1]))

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys `[N, J, P, C]` and values `[N, J, P, U]`, in place."""
        row = self.rows[layer]
        return self.keys[row], self.values[row]

    def gather_index(self, table_BM: NDArray[np.int64]) -> Tensor:
        """Returns the index with which `gather` reads sequences that have these block tables."""
        heads = table_BM[:, None, :] * self.kv_heads + np.arange(self.kv_heads)[None, :, None]
        return put(heads.reshape(-1), self.device)

    def gather(self, layer: int, index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Returns copies of the keys `[rows * J, M * P, C]` and values `[rows * J, M * P, U]` of `rows` sequences, in the order of
        positions."""
        heads, row = rows * self.kv_heads, self.rows[layer]
        k = self._key_blocks[row].index_select(0, index).view(heads, -1, self.keys.shape[-1])
        v = self._value_blocks[row].index_select(0, index).view(heads, -1, self.values.shape[-1])
        return k, v

    def copy_blocks(self, sources_N: Tensor, targets_N: Tensor) -> None:
        for tensor in (self.keys, self.values):
            tensor.index_copy_(1, targets_N, tensor.index_select(1, sources_N))

    def clear(self, blocks: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[:, :blocks].zero_()


class LatentCache(KeyValueCache):
    """The latents of the layers with latent attention. A latent and the rotated key that all heads share are stored side by side,
    as the key of a single head; the latent alone is its value. In DeepSeek-V3 these are 576 numbers per layer and position;
    keys and values would be 40,960."""

    def __init__(self, config: ModelConfig, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, blocks, device, dtype)
        assert config.latent is not None, "the caller looks"
        self.kv_rank = config.latent.kv_rank

    @staticmethod
    def shape(config: ModelConfig) -> tuple[int, int, int]:
        assert config.latent is not None, "the caller looks"
        return 1, config.latent.kv_rank + config.latent.rope_dim, 0

    def write_latents(self, layer: int, index: Tensor, rows_TC: Tensor) -> None:
        """Stores latents and shared keys, side by side, at the index that `key_index` gave."""
        self._key_rows[self.rows[layer]].index_copy_(0, index, rows_TC.to(self.dtype))

    def gather(self, layer: int, index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        k = self._key_blocks[self.rows[layer]].index_select(0, index).view(rows, -1, self.keys.shape[-1])
        return k, k[..., : self.kv_rank]


class RouteCache(_InBlocks):
    """The experts that the routers picked at each position, int16 `[N * P, Y, K]`, for the layers with experts."""

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
        """Returns the router picks at a sequence's first positions, `[positions, Y, K]`, from its blocks."""
        wanted = put(blocks, self.device)
        routes = self.picks.view(self.blocks, BLOCK_TOKENS, *self.picks.shape[1:]).index_select(0, wanted)
        return routes.flatten(0, 1)[:positions]

    def copy_blocks(self, sources_N: Tensor, targets_N: Tensor) -> None:
        blocks = self.picks.view(self.blocks, -1)
        blocks.index_copy_(0, targets_N, blocks.index_select(0, sources_N))

    def clear(self, blocks: int) -> None:
        """Does nothing, because picks are read only at positions where they were written."""


class StateCache:
    """The states of sequences in the recurrent layers: the last inputs of the convolution, `[Y, S, K - 1, W]`, and the memories
    `[Y, S, H, C, U]` (`nmoe.model.recurrence`)."""

    def __init__(self, config: ModelConfig, state_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rows = {layer: row for row, layer in enumerate(config.recurrent_layers)}
        inputs, memory = self.shapes(config)
        self.inputs = zeros((len(self.rows), state_slots, *inputs), device, dtype)
        self.memories = zeros((len(self.rows), state_slots, *memory), device, memory_dtype(dtype))

    @staticmethod
    def shapes(config: ModelConfig) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Returns the shapes of a sequence's last inputs and of its memory in one layer."""
        assert config.delta is not None, "the caller looks"
        delta = config.delta
        return (delta.conv_tokens - 1, delta.channels), (delta.value_heads, delta.key_dim, delta.value_dim)

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        return 0

    @classmethod
    def bytes_per_state_slot(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        inputs, memory = cls.shapes(config)
        numbers = math.prod(inputs) * dtype.itemsize + math.prod(memory) * memory_dtype(dtype).itemsize
        return len(config.recurrent_layers) * numbers

    def read(self, layer: int, state_slots_B: Tensor, fresh: int = 0) -> RecurrentState:
        """Returns a copy of the states of these sequences. The first `fresh` of them begin, and get the empty state."""
        row = self.rows[layer]
        state = RecurrentState(
            self.inputs[row].index_select(0, state_slots_B), self.memories[row].index_select(0, state_slots_B)
        )
        state.inputs_SKW[:fresh] = 0
        state.memory_SHCU[:fresh] = 0
        return state

    def write(self, layer: int, state_slots_B: Tensor, state: RecurrentState) -> None:
        row = self.rows[layer]
        self.inputs[row].index_copy_(0, state_slots_B, state.inputs_SKW.to(self.inputs.dtype))
        self.memories[row].index_copy_(0, state_slots_B, state.memory_SHCU)

    def copy_blocks(self, sources_N: Tensor, targets_N: Tensor) -> None:
        """Does nothing: a state belongs to the sequence, not to its positions."""

    def copy_state_slots(self, sources_S: Tensor, targets_S: Tensor) -> None:
        for tensor in (self.inputs, self.memories):
            tensor.index_copy_(1, targets_S, tensor.index_select(1, sources_S))

    def clear(self, blocks: int) -> None:
        """Does nothing: a sequence begins by writing its state."""


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros, since a masked position has weight 0, and 0 times a stray NaN would be NaN. On a CPU the system
    provides pages as they are first written, so that a large cache costs only its used part."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, device=device, dtype=dtype)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


Moves = Sequence[tuple[int, int]]
"""The (source, target) of each copy."""


@dataclass(frozen=True)
class CacheSize:
    """The number of blocks and state slots of a cache, and its size in bytes."""

    blocks: int
    state_slots: int
    bytes: int


def cache_size(
    config: ModelConfig, dtype: torch.dtype, max_sequences: int, cache_bytes: int, most_bytes: int
) -> CacheSize:
    """Returns the size of a cache of `cache_bytes`; with 0, of a cache that `max_sequences` sequences can fill at the model's full
    context, up to `most_bytes`. State slots come first: one for every sequence, and one for a prompt whose sequences have not all
    started. Raises UserError if there is not room for one block beside them."""
    size, state_slot = bytes_per_block(config, dtype), bytes_per_state_slot(config, dtype)
    state_slots, given = max_sequences + 1, cache_bytes or most_bytes
    # One block more per sequence, for its copy of the last block of a prompt that it shares.
    wanted = max_sequences * (-(-config.context_tokens // BLOCK_TOKENS) + 1)
    # Without attention and experts a block holds nothing.
    blocks = (given - state_slots * state_slot) // size if size else wanted
    blocks = blocks if cache_bytes else min(wanted, blocks)
    if blocks < 1 or given < state_slots * state_slot:
        beside = f" beside {state_slots} sequences' states ({state_slot} bytes each)" if state_slot else ""
        raise UserError(f"a cache of {given} bytes holds not even one block of this model ({size} bytes){beside}")
    if not state_slot:
        # What takes no memory is never short: whoever is prefilled, or waits to start, holds its own block.
        state_slots = blocks + max_sequences
    return CacheSize(blocks, state_slots, blocks * size + state_slots * state_slot)


def bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one block over all layers."""
    return sum(kind.bytes_per_block(config, dtype) for kind in _kinds(config))


def bytes_per_state_slot(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one state slot over all layers."""
    return sum(kind.bytes_per_state_slot(config, dtype) for kind in _kinds(config))


def _kinds(config: ModelConfig) -> list[type[LayerCache]]:
    kinds: list[type[LayerCache]] = [_attention(config)]
    if config.routed_experts:
        kinds.append(RouteCache)
    if config.recurrent_layers:
        kinds.append(StateCache)
    return kinds


def _attention(config: ModelConfig) -> type[KeyValueCache]:
    return KeyValueCache if config.latent is None else LatentCache


class PagedCache:
    """The caches of all layers of a model: `blocks` of keys and values for attention, and `state_slots`, one for each running
    sequence, for the states of recurrent layers. Decode attention computes in the cache's `dtype`."""

    def __init__(
        self, config: ModelConfig, blocks: int, state_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device, self.dtype = device, dtype
        self.attention = _attention(config)(config, blocks, device, dtype)
        self.routes = RouteCache(config, blocks, device) if config.routed_experts else None
        self.states = StateCache(config, state_slots, device, dtype) if config.recurrent_layers else None
        parts: list[LayerCache | None] = [self.attention, self.routes, self.states]
        self._parts = [part for part in parts if part is not None]

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences can share the blocks of a prefix: a recurrent layer's state at the end of a prefix is not kept."""
        return self.states is None

    @property
    def latents(self) -> LatentCache:
        """The cache of layers with latent attention."""
        assert isinstance(self.attention, LatentCache), "only layers with latent attention ask for it"
        return self.attention

    def copy(self, blocks: Moves, state_slots: Moves) -> None:
        """Copies whole blocks and whole states, in every layer."""
        for part in self._parts:
            if blocks:
                part.copy_blocks(*self._sides(blocks))
            if state_slots:
                part.copy_state_slots(*self._sides(state_slots))

    def _sides(self, moves: Moves) -> tuple[torch.Tensor, torch.Tensor]:
        sources, targets = zip(*moves, strict=True)
        return put(sources, self.device), put(targets, self.device)

    def clear(self, blocks: int) -> None:
        """Sets the first `blocks` blocks to zero."""
        for part in self._parts:
            part.clear(blocks)
