"""Samplers: values of weights that clients sample from, and the few slots of the engine that hold such values at a time."""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmoe.engine.native.engine import NativeEngine
from nmoe.runs.storage import storage_errors, sync
from nmoe.serve.tinker.weights import Base, Shape, Weights, new_weights, tensors_of

SLOTS = 4


class Held:
    """Values of weights in a file, which goes with this object, though not with the process: a client may keep a sampler of
    every step, more than memory has room for, and samples from it after the server has been killed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        weakref.finalize(self, file.unlink, missing_ok=True).atexit = False

    @classmethod
    def written(cls, values: Sequence[Tensor], directory: Path) -> Held:
        file = directory / f"values-{secrets.token_hex(8)}"
        try:
            with storage_errors(file):
                save_file({str(index): value.detach().cpu() for index, value in enumerate(values)}, file)
                sync(file)
                sync(directory)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return cls(file)

    def read(self) -> list[Tensor]:
        """Returns the values, in host memory."""
        found = load_file(self.file)
        return [found[str(index)] for index in range(len(found))]


@dataclass(eq=False)
class Sampler:
    """Values to sample from; without a shape the base. `path` names saved weights. The values of an in-flight sampler
    are replaced by later saves."""

    shape: Shape | None = None
    held: Held | None = None
    path: str | None = None


@dataclass(eq=False)
class _Slot:
    """Weights of the engine beside the base. `held` has the values that it holds, or gets from the task `loaded`."""

    name: str
    shape: Shape | None = None
    weights: Weights | None = None
    sampler: Sampler | None = None
    held: Held | None = None
    loaded: asyncio.Future[None] | None = None
    running: int = 0
    used: int = 0

    @property
    def loading(self) -> bool:
        return self.loaded is not None and not self.loaded.done()


class Slots:
    """Copies the values of samplers into the engine's slots when they are sampled from. Requests get one in the order in which
    they come: none enters a busy slot while an older one waits for a free one, which goes to the slot that was used the longest
    time ago. Used on the event loop's thread only."""

    def __init__(self, engine: NativeEngine, base: Base) -> None:
        self._engine, self._base = engine, base
        self._slots = [_Slot(f"slot {number}") for number in range(SLOTS)]
        self._waiting = deque[tuple[Sampler, asyncio.Future[_Slot]]]()
        self._clock = self._version = 0

    @asynccontextmanager
    async def of(self, sampler: Sampler) -> AsyncIterator[str | None]:
        """Yields the name of the engine's adapter that has the sampler's values as long as the context lasts; None for the base."""
        if sampler.shape is None:
            yield None
            return
        slot = await self._taken(sampler)
        try:
            assert slot.loaded is not None, "a slot that is taken gets its values"
            # Others may wait for the same values.
            await asyncio.shield(slot.loaded)
            yield slot.name
        finally:
            self._release(slot)

    async def _taken(self, sampler: Sampler) -> _Slot:
        future: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append((sampler, future))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # a slot came just before
                self._release(future.result())
            raise

    def _release(self, slot: _Slot) -> None:
        slot.running -= 1
        self._serve()

    def _serve(self, *_: object) -> None:
        """Gives slots to waiting requests, the oldest first."""
        while self._waiting:
            sampler, future = self._waiting[0]
            if not future.done():
                if (slot := self._choose(sampler)) is None:
                    return
                self._clock += 1
                slot.running, slot.used = slot.running + 1, self._clock
                if slot.held is not sampler.held:
                    self._fill(slot, sampler)
                future.set_result(slot)
            self._waiting.popleft()

    def moved(self, sampler: Sampler) -> None:
        """Has the running sequences of a sampler go on with its new values. If none runs, they are copied with the next request."""
        for slot in self._slots:
            if slot.sampler is sampler and slot.running and not slot.loading:
                self._fill(slot, sampler)

    def _fill(self, slot: _Slot, sampler: Sampler) -> None:
        slot.sampler, slot.held = sampler, sampler.held
        slot.loaded = asyncio.ensure_future(self._load(slot, sampler))
        slot.loaded.add_done_callback(self._serve)

    def _choose(self, sampler: Sampler) -> _Slot | None:
        """Returns the sampler's own slot, else the best idle one; None while there is neither."""
        for slot in self._slots:
            if slot.sampler is sampler:
                return None if slot.loading and slot.held is not sampler.held else slot
        idle = [slot for slot in self._slots if not (slot.running or slot.loading)]
        return min(idle, key=lambda slot: (slot.shape != sampler.shape, slot.used), default=None)

    async def _load(self, slot: _Slot, sampler: Sampler) -> None:
        held, shape = slot.held, sampler.shape
        assert held is not None, "the base has no values"
        assert shape is not None, "the base has no values"
        try:
            values = await asyncio.to_thread(held.read)
            await self._engine.between_steps(lambda: self._put(slot, shape, values))
        except BaseException:
            slot.sampler = slot.held = None
            raise

    @torch.no_grad()
    def _put(self, slot: _Slot, shape: Shape, values: Sequence[Tensor]) -> None:
        """Copies values into a slot, on the engine's thread. Its running sequences, of an in-flight sampler, go on with them."""
        self._version += 1
        if slot.weights is None or slot.shape != shape:
            slot.shape, slot.weights = shape, new_weights(self._base, shape)
            for parameter in slot.weights.parameters():
                parameter.requires_grad_(False)
            self._engine.put_adapter(slot.name, slot.weights)
        for tensor, value in zip(tensors_of(slot.weights), values, strict=True):
            tensor.copy_(value)
        self._engine.adapter_changed(slot.name, self._version)
