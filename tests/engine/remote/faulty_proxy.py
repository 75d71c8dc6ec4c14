"""A proxy before an engine server that answers as a broken server would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from nmoe.cluster.rehearse import proxy
from nmoe.cluster.rehearse.proxy import Ask, Proxy, whole
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
        self._proxy: Proxy | None = None

    def start(self) -> str:
        if self.server is not None:
            self.upstream = self.server.start()
        if self._proxy is None:
            self._proxy = Proxy(lambda: self.upstream, self._fault)
        return self._proxy.url

    def stop(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
        if self.server is not None:
            self.server.stop()

    def _fault(self, path: str) -> proxy.Fault | None:
        self.seen[path] = number = self.seen.get(path, 0) + 1
        if (fault := self.fault(path, number)) is None:
            return None
        self.done.append(fault)
        own: dict[Fault, proxy.Fault] = {
            "drop": proxy.FAULTS["lost"],
            "torn": proxy.FAULTS["torn"],
            "twice": proxy.FAULTS["twice"],
            "hang": _hang,
            "late": self._late,
            "error": _error,
            "stale": _stale,
        }
        return own[fault]

    async def _late(self, ask: Ask) -> tuple[bytes, bool]:
        reply = await ask()
        await asyncio.sleep(self.late_s)
        return whole(reply), True


async def _hang(ask: Ask) -> tuple[bytes, bool]:
    await asyncio.sleep(3600)
    return b"", False


async def _error(ask: Ask) -> tuple[bytes, bool]:
    return whole(replace(await ask(), status_code=500, content=b'{"error": {"message": "EngineDeadError"}}')), True


async def _stale(ask: Ask) -> tuple[bytes, bool]:
    reply = await ask()
    older = reply.content.replace(b'"version":"1"', b'"version":"0"').replace(b'"version":"2"', b'"version":"1"')
    return whole(replace(reply, content=older)), True
