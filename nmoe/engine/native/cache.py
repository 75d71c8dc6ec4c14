"""The engine's cache: what every kind of layer keeps of the sequences, in blocks of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nmoe.engine.native.layer_cache import BLOCK_TOKENS, KeyValueCache, LatentCache, LayerCache, RouteCache
from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.device import put


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
    """The size of one block: what all kinds of layers keep of its positions."""
    return sum(kind.bytes_per_block(config, dtype) for kind in _kinds(config))


def _kinds(config: ModelConfig) -> list[type[LayerCache]]:
    return [_attention(config), RouteCache] if config.routed_experts else [_attention(config)]


def _attention(config: ModelConfig) -> type[KeyValueCache]:
    return KeyValueCache if config.latent is None else LatentCache


class PagedCache:
    """The caches of a model's kinds of layers, with so many blocks each. Decode attention computes in the cache's `dtype`."""

    def __init__(self, config: ModelConfig, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.attention = _attention(config)(config, blocks, device, dtype)
        self.routes = RouteCache(config, blocks, device) if config.routed_experts else None
        parts: list[LayerCache | None] = [self.attention, self.routes]
        self._parts = [part for part in parts if part is not None]

    @property
    def latents(self) -> LatentCache:
        """The cache of layers with latent attention."""
        assert isinstance(self.attention, LatentCache), "only layers with latent attention ask for it"
        return self.attention

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole blocks, with all that is kept of their positions."""
        source, target = (put(blocks, self.device) for blocks in (sources, targets))
        for part in self._parts:
            part.copy(source, target)

    def clear(self, blocks: int) -> None:
        """Sets the first `blocks` blocks to zero."""
        for part in self._parts:
            part.clear(blocks)
