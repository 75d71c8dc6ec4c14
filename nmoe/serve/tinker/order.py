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
        """Returns once all earlier requests are done. Raises TinkerError if one of them does not come; one that runs may take any
        time."""
        async with self._moved:
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
                    self.next = min(self._here | self._over)
                    raise TinkerError(f"seq_id = {seq_id}: the request {missing} before it never came") from None

    async def idle(self) -> None:
        """Returns once no request waits or runs."""
        async with self._moved:
            await self._moved.wait_for(lambda: not self._here)

    async def done(self, seq_id: int) -> None:
        """Lets the next request follow, once all before it are done: one that waits for its turn can be cancelled."""
        async with self._moved:
            self._here.discard(seq_id)
            self.skip(seq_id)
            self._moved.notify_all()

    def skip(self, seq_id: int) -> None:
        """Ends a turn that no request has taken, before any waits for another."""
        self._over.add(seq_id)
        while self.next in self._over:
            self._over.remove(self.next)
            self.next += 1
