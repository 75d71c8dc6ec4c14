"""A reply of events whose client takes nothing, not even its beginning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest
from starlette.types import Message

from nmoe.engine.server.events import CONNECTION, EventStream


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


def test_pushed_events_keep_their_order_where_the_client_is_slow() -> None:
    sent, full, go_on = list[bytes](), asyncio.Event(), asyncio.Event()

    async def connection(message: Message) -> None:
        if message.get("body") == b"2":
            full.set()
            await asyncio.sleep(0.01)  # a pushed message that has to wait, more than once
            await asyncio.sleep(0.01)
        sent.append(message.get("body", b"begin"))

    async def begin(message: Message) -> None:
        sent.append(message.get("body", b"begin"))

    async def receive() -> Message:
        return await asyncio.Future()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"0"
        await go_on.wait()
        yield b"3"

    async def reply() -> None:
        stream = EventStream(events(), AsyncExitStack(), 0.5)
        free_before = stream.free
        replying = asyncio.create_task(stream({"type": "http", CONNECTION: connection}, receive, begin))
        while not stream.free:
            await asyncio.sleep(0)
        stream.push(b"1")
        free_after_one = stream.free
        stream.push(b"2")
        await full.wait()
        assert (free_before, free_after_one, stream.free) == (False, True, False)
        assert sent == [b"begin", b"0", b"1"], "the first is sent by the time that push returns"
        go_on.set()
        await replying

    asyncio.run(reply())
    assert sent == [b"begin", b"0", b"1", b"2", b"3", b""]


def test_a_client_that_does_not_take_what_was_pushed_is_let_go() -> None:
    let_go, sent = list[str](), list[bytes]()

    async def send(message: Message) -> None:
        if message.get("body") == b"pushed":
            try:
                await asyncio.Future()
            finally:
                let_go.append("the message")
        sent.append(message.get("body", b"begin"))

    async def receive() -> Message:
        return await asyncio.Future()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"first"
        await asyncio.Future()

    async def reply() -> int:
        held = AsyncExitStack()
        held.callback(let_go.append, "the slot")
        stream = EventStream(events(), held, 0.1)
        replying = asyncio.create_task(stream({"type": "http"}, receive, send))
        while not stream.free:
            await asyncio.sleep(0)
        stream.push(b"pushed")
        await asyncio.wait_for(replying, 5)
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(reply()) == 0
    assert sorted(let_go) == ["the message", "the slot"]
    assert sent == [b"begin", b"first"]
