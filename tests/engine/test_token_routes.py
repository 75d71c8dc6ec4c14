"""The routes of tokens where the server ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2
from starlette.applications import Starlette

from nmoe.engine.server.tokens import TokenRoutes


class Endless:
    """An engine whose scorings never end."""

    adapters = ()

    def __init__(self) -> None:
        self.ended = 0
        self.began = asyncio.Event()

    async def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        self.began.set()
        try:
            return await asyncio.Future()
        finally:
            self.ended += 1

    def abort(self, request_id: str) -> None:
        assert request_id == "", "no request samples"


async def admit() -> None: ...


def test_a_scoring_ends_with_the_server() -> None:
    async def ended() -> tuple[int, int, bool]:
        engine: Any = Endless()
        routes = TokenRoutes(engine, admit, lambda: 0)
        app = Starlette(routes=routes.routes())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as client:
            asking = asyncio.create_task(client.post("/score", json={"token_ids": [1, 2]}))
            await engine.began.wait()
            routes.end_all()  # of the engine server's pause, which scorings outlast
            await asyncio.sleep(0.05)
            assert not asking.done()
            routes.end_scorings()
            reply = await asyncio.wait_for(asking, 5)
            return reply.status_code, engine.ended, routes.idle.is_set()

    assert asyncio.run(ended()) == (503, 1, True)
