"""Samplers: values of adapters that clients sample from, and the few slots of the engine that hold such values at a time."""

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

SLOTS = 4


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
class _Slot:
    name: str
    shape: Shape | None = None
    lora: Lora | None = None
    sampler: Sampler | None = None
    changes: int = 0  # of the sampler, when its values were copied
    running: int = 0
    loading: bool = False
    used: int = field(default=0)


class Slots:
    """Copies the values of samplers into the engine's adapters when they are sampled from. A slot that is idle is given to the
    sampler that waits for one, the least recently used first. Used on the event loop's thread only."""

    def __init__(self, engine: NativeEngine, base: Base) -> None:
        self._engine, self._base = engine, base
        self._slots = [_Slot(f"slot {number}") for number in range(SLOTS)]
        self._freed = asyncio.Condition()
        self._clock = self._version = 0

    @asynccontextmanager
    async def of(self, sampler: Sampler) -> AsyncIterator[str | None]:
        """Yields the name of the engine's adapter that has the sampler's values as long as the context lasts; None for the base."""
        if sampler.shape is None:
            yield None
            return
        slot = await self._taken(sampler)
        try:
            yield slot.name
        finally:
            async with self._freed:
                slot.running -= 1
                self._freed.notify_all()

    async def _taken(self, sampler: Sampler) -> _Slot:
        async with self._freed:
            while (slot := self._choose(sampler)) is None or slot.loading:
                await self._freed.wait()
            self._clock += 1
            slot.running, slot.used = slot.running + 1, self._clock
            if slot.sampler is sampler and slot.changes == sampler.changes:
                return slot
            slot.loading, slot.sampler, slot.changes = True, sampler, sampler.changes
        try:
            values, shape = sampler.values, sampler.shape
            await self._engine.between_steps(lambda: self._load(slot, shape, values))
        except BaseException:
            slot.sampler = None
            slot.running -= 1
            raise
        finally:
            async with self._freed:
                slot.loading = False
                self._freed.notify_all()
        return slot

    def _choose(self, sampler: Sampler) -> _Slot | None:
        """Returns the sampler's own slot, else the best idle one."""
        for slot in self._slots:
            if slot.sampler is sampler:
                return slot
        idle = [slot for slot in self._slots if not (slot.running or slot.loading)]
        return min(idle, key=lambda slot: (slot.shape != sampler.shape, slot.used), default=None)

    @torch.no_grad()
    def _load(self, slot: _Slot, shape: Shape | None, values: Sequence[Tensor]) -> None:
        """Copies values into a slot, on the engine's thread. Its running sequences, of an in-flight sampler, go on with them."""
        assert shape is not None, "the base has no values"
        self._version += 1
        if slot.lora is None or slot.shape != shape:
            slot.shape, slot.lora = shape, new_lora(self._base, shape)
            slot.lora.detach()
            for parameter in slot.lora.parameters():
                parameter.requires_grad_(False)
            self._engine.put_adapter(slot.name, slot.lora)
        for parameter, value in zip(slot.lora.parameters(), values, strict=True):
            parameter.copy_(value)
        self._engine.adapter_changed(slot.name, self._version)
