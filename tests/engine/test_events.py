"""A reply of events whose client takes nothing, not even its beginning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest
from starlette.types import Message

from nmoe.engine.server.events import EventStream


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_reply_lets_go_of_what_it_holds_wherever_its_client_stops(taken: int) -> None:
    let_go, sent = list[str](), list[Message]()

    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(5):
            yield b"data: 1\n\n"

    async def receive() -> Message:
        return await asyncio.Future()

    async def send(message: Message) -> None:
        if len(sent) == taken:
            await asyncio.Future()
        sent.append(message)

    async def reply() -> None:
        held = AsyncExitStack()
        held.callback(let_go.append, "the slot")
        await asyncio.wait_for(EventStream(events(), held, 0.1)({"type": "http"}, receive, send), 5)

    asyncio.run(reply())
    assert let_go == ["the slot"]
    assert len(sent) == taken


def test_a_client_that_takes_slowly_is_kept() -> None:
    sent = list[Message]()

    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(4):
            yield b"data: 1\n\n"

    async def receive() -> Message:
        return await asyncio.Future()

    async def send(message: Message) -> None:
        await asyncio.sleep(0.15)
        sent.append(message)

    asyncio.run(EventStream(events(), AsyncExitStack(), 0.3)({"type": "http"}, receive, send))
    assert len(sent) == 6
