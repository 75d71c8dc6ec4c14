"""Samplers: values of adapters that clients sample from, and the few places of the engine that hold such values at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nmoe.engine.native.engine import NativeEngine
from nmoe.model.lora import Lora
from nmoe.serve.tinker.models import Base, Shape, new_lora

PLACES = 4


@dataclass(eq=False)
class Sampler:
    """Values of an adapter to sample from; without a shape the base. `path` names saved weights. The values of an in-flight sampler
    are replaced by later saves, and `changes` counts them."""

    shape: Shape | None = None
    values: Sequence[Tensor] = ()
    path: str | None = None
    changes: int = 0

    def replace(self, values: Sequence[Tensor]) -> None:
        self.values, self.changes = values, self.changes + 1


@dataclass(eq=False)
class _Place:
    name: str
    shape: Shape | None = None
    lora: Lora | None = None
    sampler: Sampler | None = None
    changes: int = 0  # of the sampler, when its values were copied
    running: int = 0
    loading: bool = False
    used: int = field(default=0)


class Places:
    """Copies the values of samplers into the engine's adapters when they are sampled from. A place that is idle is given to the
    sampler that waits for one, the least recently used first. Used on the event loop's thread only."""

    def __init__(self, engine: NativeEngine, base: Base) -> None:
        self._engine, self._base = engine, base
        self._places = [_Place(f"place {number}") for number in range(PLACES)]
        self._freed = asyncio.Condition()
        self._clock = self._version = 0

    @asynccontextmanager
    async def of(self, sampler: Sampler) -> AsyncIterator[str | None]:
        """Yields the name of the engine's adapter that has the sampler's values as long as the context lasts; None for the base."""
        if sampler.shape is None:
            yield None
            return
        place = await self._taken(sampler)
        try:
            yield place.name
        finally:
            async with self._freed:
                place.running -= 1
                self._freed.notify_all()

    async def _taken(self, sampler: Sampler) -> _Place:
        async with self._freed:
            while (place := self._choose(sampler)) is None or place.loading:
                await self._freed.wait()
            self._clock += 1
            place.running, place.used = place.running + 1, self._clock
            if place.sampler is sampler and place.changes == sampler.changes:
                return place
            place.loading, place.sampler, place.changes = True, sampler, sampler.changes
        try:
            values, shape = sampler.values, sampler.shape
            await self._engine.between_steps(lambda: self._load(place, shape, values))
        except BaseException:
            place.sampler = None
            place.running -= 1
            raise
        finally:
            async with self._freed:
                place.loading = False
                self._freed.notify_all()
        return place

    def _choose(self, sampler: Sampler) -> _Place | None:
        """Returns the sampler's own place, else the best idle one."""
        for place in self._places:
            if place.sampler is sampler:
                return place
        idle = [place for place in self._places if not (place.running or place.loading)]
        return min(idle, key=lambda place: (place.shape != sampler.shape, place.used), default=None)

    @torch.no_grad()
    def _load(self, place: _Place, shape: Shape | None, values: Sequence[Tensor]) -> None:
        """Copies values into a place, on the engine's thread. Its running sequences, of an in-flight sampler, go on with them."""
        assert shape is not None, "the base has no values"
        self._version += 1
        if place.lora is None or place.shape != shape:
            place.shape, place.lora = shape, new_lora(self._base, shape)
            place.lora.detach()
            for parameter in place.lora.parameters():
                parameter.requires_grad_(False)
            self._engine.put_adapter(place.name, place.lora)
        for parameter, value in zip(place.lora.parameters(), values, strict=True):
            parameter.copy_(value)
        self._engine.adapter_changed(place.name, self._version)
