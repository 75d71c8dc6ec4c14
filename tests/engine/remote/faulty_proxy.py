"""A proxy before an engine server that answers as a broken server would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Literal

import httpx2

from nmoe.engine.remote.process import ServerProcess

Fault = Literal["drop", "hang", "late", "torn", "twice", "error", "stale"]
FAULTS: tuple[Fault, ...] = ("drop", "hang", "late", "torn", "twice", "error", "stale")


class FaultyProxy:
    """Forwards requests to `upstream`, a URL, or a server that it starts, and starts again. `fault(path, number)` says what to do
    to the number-th request of a path; None forwards it.

    drop: closes the connection. hang: never answers. late: answers after `late_s`. torn: sends half of the reply and closes.
    twice: sends the reply two times. error: status 500. stale: replaces the weight version in the reply by an older one.
    """

    def __init__(
        self, upstream: str | ServerProcess, fault: Callable[[str, int], Fault | None], late_s: float = 7.0
    ) -> None:
        self.server = None if isinstance(upstream, str) else upstream
        self.name, self.restarts = "proxy", self.server is not None
        self.upstream, self.fault, self.late_s = str(upstream), fault, late_s
        self.seen: dict[str, int] = {}
        self.done: list[Fault] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> str:
        if self.server is not None:
            self.upstream = self.server.start()
        if not self._thread.is_alive():
            self._thread.start()
            self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
        if self.server is not None:
            self.server.stop()

    async def _end(self) -> None:
        self._server.close()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.aclose()

    async def _listen(self) -> asyncio.Server:
        self._client = httpx2.AsyncClient(timeout=None, trust_env=False)
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                first, *lines = head.strip().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines)
                length = next((int(v) for k, v in headers.items() if k.lower() == "content-length"), 0)
                body = await reader.readexactly(length)
                if not await self._answer(first.split(" ")[0], first.split(" ")[1], headers, body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, httpx2.HTTPError, asyncio.CancelledError):
            pass
        writer.close()

    async def _answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        path = target.split("?")[0]
        self.seen[path] = number = self.seen.get(path, 0) + 1
        fault = self.fault(path, number)
        if fault is not None:
            self.done.append(fault)
        if fault == "drop":
            return False
        if fault == "hang":
            await asyncio.sleep(3600)
        kept = {k: v for k, v in headers.items() if k.lower() not in ("host", "content-length", "connection")}
        reply = await self._client.request(method, self.upstream + target, headers=kept, content=body)
        status, content = reply.status_code, reply.content
        if fault == "late":
            await asyncio.sleep(self.late_s)
        if fault == "error":
            status, content = 500, b'{"error": {"message": "EngineDeadError"}}'
        if fault == "stale":
            content = content.replace(b'"version":"1"', b'"version":"0"').replace(b'"version":"2"', b'"version":"1"')
        full = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(content))
        full += content
        writer.write(full[: -len(content) // 2] if fault == "torn" else full * (2 if fault == "twice" else 1))
        await writer.drain()
        return fault != "torn"
