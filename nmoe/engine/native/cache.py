"""The engine's cache: what every kind of layer keeps of the sequences, in blocks of positions and seats of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nmoe.engine.native.layer_cache import (
    BLOCK_TOKENS,
    KeyValueCache,
    LatentCache,
    LayerCache,
    RouteCache,
    StateCache,
)
from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.device import put

Moves = Sequence[tuple[int, int]]
"""What is copied: (source, target) each."""


@dataclass(frozen=True)
class CacheSize:
    """How many blocks and seats a cache has, and the bytes of all."""

    blocks: int
    seats: int
    bytes: int


def cache_size(
    config: ModelConfig, dtype: torch.dtype, max_sequences: int, cache_bytes: int, most_bytes: int
) -> CacheSize:
    """A cache of `cache_bytes`; with 0, one that `max_sequences` can fill at the model's full context, up to `most_bytes`. Seats
    come first: one for every sequence, and one for a prompt whose sequences have not all started. Raises UserError if there is not
    room for one block beside them."""
    size, seat = bytes_per_block(config, dtype), bytes_per_seat(config, dtype)
    seats, given = max_sequences + 1, cache_bytes or most_bytes
    # One block more per sequence, for its copy of the last block of a prompt that it shares.
    wanted = max_sequences * (-(-config.context_tokens // BLOCK_TOKENS) + 1)
    # Without attention and experts a block holds nothing.
    blocks = (given - seats * seat) // size if size else wanted
    blocks = blocks if cache_bytes else min(wanted, blocks)
    if blocks < 1 or given < seats * seat:
        beside = f" beside {seats} sequences' states ({seat} bytes each)" if seat else ""
        raise UserError(f"a cache of {given} bytes holds not even one block of this model ({size} bytes){beside}")
    if not seat:
        # What takes no memory is never short: whoever is prefilled, or waits to start, holds its own block.
        seats = blocks + max_sequences
    return CacheSize(blocks, seats, blocks * size + seats * seat)


def bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
    """The size of one block: what all kinds of layers keep of its positions."""
    return sum(kind.bytes_per_block(config, dtype) for kind in _kinds(config))


def bytes_per_seat(config: ModelConfig, dtype: torch.dtype) -> int:
    """The size of one seat: what all kinds of layers keep of a sequence as a whole."""
    return sum(kind.bytes_per_seat(config, dtype) for kind in _kinds(config))


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
    """The caches of a model's kinds of layers, with so many blocks and seats. Decode attention computes in the cache's `dtype`."""

    def __init__(self, config: ModelConfig, blocks: int, seats: int, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.attention = _attention(config)(config, blocks, device, dtype)
        self.routes = RouteCache(config, blocks, device) if config.routed_experts else None
        self.states = StateCache(config, seats, device, dtype) if config.recurrent_layers else None
        parts: list[LayerCache | None] = [self.attention, self.routes, self.states]
        self._parts = [part for part in parts if part is not None]

    @property
    def shares_prefixes(self) -> bool:
        """Whether blocks are all that a sequence needs of a prefix. Where states stand at a prefix's end is not kept."""
        return self.states is None

    @property
    def latents(self) -> LatentCache:
        """The cache of layers with latent attention."""
        assert isinstance(self.attention, LatentCache), "only layers with latent attention ask for it"
        return self.attention

    def copy(self, blocks: Moves, seats: Moves) -> None:
        """Copies whole blocks and whole seats, with all that is kept there."""
        for part in self._parts:
            if blocks:
                part.copy_blocks(*self._sides(blocks))
            if seats:
                part.copy_seats(*self._sides(seats))

    def _sides(self, moves: Moves) -> tuple[torch.Tensor, torch.Tensor]:
        sources, targets = zip(*moves, strict=True)
        return put(sources, self.device), put(targets, self.device)

    def clear(self, blocks: int) -> None:
        """Sets the first `blocks` blocks to zero."""
        for part in self._parts:
            part.clear(blocks)
