"""A reply of server-sent events, which ends its work when the client goes, or stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nmoe.engine.server.http import closed

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events as they come. The generator is closed if the client closes its connection, or takes nothing for `stalled_s`
    seconds, if there is such a limit, so that nothing is computed or kept for it. `held` is closed with it, also where the
    generator has not begun."""

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        sending, gone = asyncio.create_task(self._send(send)), asyncio.create_task(closed(receive))
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
            sending.cancel()
            await asyncio.wait((sending,))
            try:
                await self._events.aclose()
            finally:
                await self._held.aclose()

    async def _send(self, send: Send) -> None:
        self._messages = 1
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._taken = 1
        async for data in self._events:
            self._messages += 1
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._taken += 1
        # Before the end of the reply, after which the client may ask again.
        await self._held.aclose()
        self._messages += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._taken += 1
