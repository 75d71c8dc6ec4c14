"""The order of a model's requests: by their sequence ids, however they come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from nmoe.serve.tinker.errors import TinkerError

# Seconds for which a request waits for those before it, whose client may have died between two of them.
_PATIENCE_S = 120.0
MOST = 2**62
"""Sequence ids are below."""


class Order:
    """Turns of one model. A request takes `turn(seq_id)`, does its work, and calls `done`; the next one follows. Used on the event
    loop's thread only."""

    def __init__(self, first: int = 1, patience_s: float = _PATIENCE_S, over: Iterable[int] = ()) -> None:
        """The `first` turn comes next; of the later ones some may be `over`."""
        self.next = first
        self._patience_s = patience_s
        self._here, self._over = set[int](), set(over)
        self._lost = dict[int, int]()  # the missing request by each that waited for it
        self._moved = asyncio.Condition()

    def check(self, seq_id: int) -> None:
        """Raises TinkerError for a request whose turn is over."""
        if seq_id < 1:
            raise TinkerError(f"seq_id = {seq_id}: counts from 1")
        if seq_id >= MOST:
            raise TinkerError(f"seq_id = {seq_id}: must be below {MOST}")
        if seq_id < self.next or seq_id in self._over:
            raise TinkerError(f"seq_id = {seq_id}: was there already; the next is {self.next}")

    async def turn(self, seq_id: int) -> None:
        """Returns once all earlier requests are done. If one of them does not come, all that wait raise TinkerError: the client
        sent them as if it had, and a step after a pass that is missing would be on a part of its batch. One that runs may take any
        time."""
        async with self._moved:
            if seq_id < self.next:  # those behind it failed while it was written to the disk
                self.check(seq_id)
            self._here.add(seq_id)
            self._moved.notify_all()
            now, missing, until = asyncio.get_running_loop().time, -1, 0.0
            while self.next < seq_id:
                if missing != self.next:
                    missing, until = self.next, now() + self._patience_s
                try:
                    async with asyncio.timeout_at(None if missing in self._here else until):
                        await self._moved.wait()
                except TimeoutError:
                    if self.next != missing:  # another one has just failed of it
                        continue
                    self._lost = dict.fromkeys(self._here, missing)
                    self.next = max(self._here) + 1
                    self._moved.notify_all()
            if seq_id in self._lost:
                raise TinkerError(f"seq_id = {seq_id}: the request {self._lost[seq_id]} before it never came")

    async def idle(self) -> None:
        """Returns once no request waits or runs."""
        async with self._moved:
            await self._moved.wait_for(lambda: not self._here)

    async def done(self, seq_id: int) -> None:
        """Lets the next request follow, once all before it are done: one that waits for its turn can be cancelled."""
        async with self._moved:
            self._here.discard(seq_id)
            self._lost.pop(seq_id, None)
            self.skip(seq_id)
            self._moved.notify_all()

    def skip(self, seq_id: int) -> None:
        """Ends a turn that no request has taken, before any waits for another."""
        self._over.add(seq_id)
        while self.next in self._over:
            self.next += 1
        self._over = {one for one in self._over if one > self.next}
