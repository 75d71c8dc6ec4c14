"""A proxy before an engine server, which answers as a broken server would."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from nmoe.engine.remote.connections import Reply

if TYPE_CHECKING:
    import httpx2

Ask = Callable[[], Awaitable[Reply]]
Fault = Callable[[Ask], Awaitable[tuple[bytes, bool]]]
"""Returns the bytes to send instead of the reply, for which it may ask the server, and whether the connection is kept."""

# Seconds between two looks whether a client still waits.
_LOOK_S = 0.05
_LOGPROB = re.compile(rb'("logprob": ?)(-?[\d.eE+-]+)')


def whole(reply: Reply) -> bytes:
    """Returns the bytes of a reply."""
    lines = [f"HTTP/1.1 {reply.status_code} -", *(f"{name}: {value}" for name, value in reply.headers.items())]
    return "\r\n".join([*lines, f"content-length: {len(reply.content)}", "", ""]).encode("latin1") + reply.content


async def _torn(ask: Ask) -> tuple[bytes, bool]:
    reply = await ask()
    return whole(reply)[: -len(reply.content) // 2], False


async def _twice(ask: Ask) -> tuple[bytes, bool]:
    return whole(await ask()) * 2, True


async def _wrong(ask: Ask) -> tuple[bytes, bool]:
    reply = await ask()
    content = _LOGPROB.sub(lambda found: found[1] + b"%.6f" % (float(found[2]) * 1.5 - 0.1), reply.content)
    return whole(replace(reply, content=content)), True


async def _lost(ask: Ask) -> tuple[bytes, bool]:
    return b"", False


Answer = Literal["torn", "twice", "wrong", "lost"]
"""`torn`: half of the reply. `twice`: the reply two times. `wrong`: other log-probabilities, as of other weights. `lost`: none."""
FAULTS: Mapping[Answer, Fault] = {"torn": _torn, "twice": _twice, "wrong": _wrong, "lost": _lost}


class Proxy:
    """Forwards HTTP requests to the server at `upstream()`. `fault(path)` says how to answer a request; None as the server does."""

    def __init__(self, upstream: Callable[[], str], fault: Callable[[str], Fault | None]) -> None:
        self._upstream, self._fault = upstream, fault
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nmoe-proxy", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        import httpx2

        self._client: httpx2.AsyncClient = httpx2.AsyncClient(
            timeout=None, trust_env=False, limits=httpx2.Limits(max_connections=None)
        )
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _end(self) -> None:
        self._server.close()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import httpx2

        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.pop("content-length", "0")))
                method, target, _ = first.split(" ")
                answering = asyncio.ensure_future(self._answer(method, target, headers, body, writer))
                while not answering.done() and not reader.at_eof():
                    await asyncio.wait((answering,), timeout=_LOOK_S)
                if not answering.done():
                    answering.cancel()  # the client has gone, and its request may not stay with the server
                    break
                if not answering.result():
                    break
        except (asyncio.IncompleteReadError, ConnectionError, httpx2.HTTPError):
            pass  # one of the two has gone, as happens to real ones
        finally:
            writer.close()

    async def _answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Returns whether the connection is kept."""

        async def ask() -> Reply:
            sent = {name: value for name, value in headers.items() if name not in ("host", "connection")}
            reply = await self._client.request(method, self._upstream() + target, headers=sent, content=body)
            kept = {name: value for name, value in reply.headers.items() if name.startswith(("content-type", "x-"))}
            return Reply(reply.status_code, kept, reply.content)

        fault = self._fault(target.partition("?")[0])
        sent, keeps = (whole(await ask()), True) if fault is None else await fault(ask)
        writer.write(sent)
        await writer.drain()
        return keeps
