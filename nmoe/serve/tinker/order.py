"""The order of a model's requests: by their sequence ids, however they come."""

from __future__ import annotations

import asyncio

from nmoe.serve.tinker.errors import TinkerError

# Seconds for which a request waits for those before it, whose client may have died between two of them.
_PATIENCE_S = 120.0


class Order:
    """Turns of one model. A request takes `turn(seq_id)`, does its work, and calls `done`; the next one follows. Used on the event
    loop's thread only."""

    def __init__(self, first: int = 1, patience_s: float = _PATIENCE_S) -> None:
        self.next = first
        self._patience_s = patience_s
        self._moved = asyncio.Condition()

    def check(self, seq_id: int) -> None:
        """Raises TinkerError (409) for a request whose turn is over."""
        if seq_id < 1:
            raise TinkerError(f"seq_id = {seq_id}: counts from 1")
        if seq_id < self.next:
            raise TinkerError(f"seq_id = {seq_id}: was there already; the next is {self.next}", 409)

    async def turn(self, seq_id: int) -> None:
        """Returns once all earlier requests are done. Raises TinkerError if one of them does not come."""
        async with self._moved:
            while self.next < seq_id:
                waited_for = self.next
                try:
                    async with asyncio.timeout(self._patience_s):
                        await self._moved.wait_for(lambda waited_for=waited_for: self.next != waited_for)  # type: ignore[misc]
                except TimeoutError:
                    raise TinkerError(f"seq_id = {seq_id}: the request {waited_for} before it never came") from None

    async def done(self, seq_id: int) -> None:
        """Lets the next request follow."""
        async with self._moved:
            self.next = max(self.next, seq_id + 1)
            self._moved.notify_all()
