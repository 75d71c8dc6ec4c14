"""A reply of server-sent events, which ends its work when the client goes, or stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nmoe.engine.server.http import closed

DONE = b"data: [DONE]\n\n"

CONNECTION = "nmoe.send"
"""The key of a scope under which an application leaves its own `send`: Starlette hands each message through three coroutines, which
matter to the beginning of a reply alone."""


class EventStream(Response):
    """Sends events as they come. The generator is closed if the client closes its connection, or takes nothing for `stalled_s`
    seconds, if there is such a limit, so that nothing is computed or kept for it. `held` is closed with it, also where the
    generator has not begun.

    While the generator waits, `push` sends events past it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        held: AsyncExitStack,
        stalled_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._held, self._stalled_s = events, held, stalled_s
        self._messages, self._taken = 0, 0  # that were given to the connection, and that it has taken
        self._connection: Send | None = None  # once the reply has begun
        self._pushed: asyncio.Task[None] | None = None  # pushed events that wait for the client

    @property
    def free(self) -> bool:
        """Whether the reply has begun, and the client has taken all of it so far."""
        return self._connection is not None and self._taken == self._messages

    def push(self, data: bytes) -> None:
        """Sends events at once, without a task that wakes up for them. The stream must be `free`, and its generator wait."""
        assert self._connection is not None, "a free one has begun"
        self._messages += 1
        steps = self._connection({"type": "http.response.body", "body": data, "more_body": True}).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            self._taken += 1
        else:
            self._pushed = asyncio.create_task(self._push_on(_Begun(steps, waits_for)))

    async def _push_on(self, begun: _Begun) -> None:
        await begun
        self._taken += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(self._send(send, scope.get(CONNECTION, send)))
        gone = asyncio.create_task(closed(receive))
        taken, since, limit = 0, loop.time(), self._stalled_s
        try:
            while not (sending.done() or gone.done()):
                looks_after = None if limit is None else limit / 4
                await asyncio.wait((sending, gone), timeout=looks_after, return_when=asyncio.FIRST_COMPLETED)
                # Not timed message by message, which would read the clock twice for each token.
                if self._taken == self._messages or self._taken != taken:
                    taken, since = self._taken, loop.time()
                elif limit is not None and loop.time() - since > limit:
                    break
            if sending.done():
                sending.result()
        finally:
            gone.cancel()
            ending = [task for task in (sending, self._pushed) if task is not None]
            for task in ending:
                task.cancel()
            await asyncio.wait(ending)
            try:
                await self._events.aclose()
            finally:
                await self._held.aclose()

    async def _send(self, send: Send, connection: Send) -> None:
        self._messages = 1
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._taken = 1
        async for data in self._events:
            if self._pushed is not None:
                await self._pushed
            self._messages += 1
            await connection({"type": "http.response.body", "body": data, "more_body": True})
            self._taken += 1
            self._connection = connection
        # Before the end of the reply, after which the client may ask again.
        await self._held.aclose()
        self._messages += 1
        await connection({"type": "http.response.body", "body": b"", "more_body": False})
        self._taken += 1


class _Begun:
    """The rest of an awaitable that has run up to its first wait."""

    def __init__(self, steps: Generator[Any, Any, None], waits_for: Any) -> None:
        self._steps, self._waits_for = steps, waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._waits_for
        except BaseException:
            self._steps.close()
            raise
        yield from self._steps
