"""How long a server has answered nothing at all."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from nmoe.engine.remote.server import ServerLostError

R = TypeVar("R")
# Seconds after which a silent server is noted.
_NOTED_S = 600.0


class Silence:
    """The silence of one server. All requests are sent to it at once, and the last one waits for all others, so that any answer
    breaks the silence."""

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        """`name` is the server's, for messages."""
        self._name, self._note = name, note
        self._answered, self._noted = 0.0, -math.inf

    async def broken_by(self, asked: Coroutine[Any, Any, R], silent_s: float) -> R:
        """Returns the server's answer to a request. Raises ServerLostError once it has answered no request for so many seconds;
        a silence of ten minutes is noted before."""
        task, began = asyncio.ensure_future(asked), time.monotonic()
        try:
            while not task.done():
                now = time.monotonic()
                silence = now - max(began, self._answered)
                if silence >= silent_s:
                    raise ServerLostError(f"{self._name} has answered nothing for {silence:.0f} s")
                if silence >= _NOTED_S <= now - self._noted:
                    self._noted = now
                    self._note(
                        f"{self._name} has answered nothing for {silence:.0f} s; it is lost after {silent_s:.0f} s"
                    )
                await asyncio.wait((task,), timeout=min(silent_s - silence, _NOTED_S))
            result = task.result()
            self._answered = time.monotonic()
            return result
        finally:
            task.cancel()
