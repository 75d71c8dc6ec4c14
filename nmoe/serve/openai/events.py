"""A reply of server-sent events, which ends its work when the client goes, or stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from nmoe.engine.server.http import closed

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events as they come. The generator is closed if the client closes its connection, or takes nothing for `stalled_s`
    seconds, so that nothing is computed or kept for it. `held` is closed with it, also where the generator has not begun."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], held: AsyncExitStack, stalled_s: float, headers: dict[str, str]
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        del self.headers["content-length"]
        self._events, self._held, self._stalled_s = events, held, stalled_s
        self._since = 0.0  # when the message began to be sent that is being sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        sending, gone = asyncio.create_task(self._send(send)), asyncio.create_task(closed(receive))
        try:
            while not (sending.done() or gone.done()):
                await asyncio.wait((sending, gone), timeout=self._stalled_s / 4, return_when=asyncio.FIRST_COMPLETED)
                if self._since and loop.time() - self._since > self._stalled_s:
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
        now = asyncio.get_running_loop().time

        async def timed(message: Message) -> None:
            self._since = now()
            await send(message)
            self._since = 0.0

        await timed({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await timed({"type": "http.response.body", "body": data, "more_body": True})
        # Before the end of the reply, after which the client may ask again.
        await self._held.aclose()
        await timed({"type": "http.response.body", "body": b"", "more_body": False})
