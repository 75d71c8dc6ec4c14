"""Runs the engine's requests behind one request of a client, and reads their samples as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from nmoe.engine.api import Delta, Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.serve.openai.reading import Addition, Choice

_WAITING = 64  # steps that wait to be sent, of all prompts


@dataclass(frozen=True)
class Run:
    """A request to the engine, and the choices that read its samples, by their index in it."""

    request: Request
    choices: Sequence[Choice]

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)


async def steps(engine: NativeEngine, runs: Sequence[Run], seconds: float) -> AsyncGenerator[list[Addition], None]:
    """Yields what each step of the engine adds to the choices. After `seconds` the runs end with the tokens so far."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(seconds, end, engine, runs, "deadline")
    try:
        if len(runs) == 1:
            async for added in _of_one(engine, runs[0]):
                yield added
        else:
            async for added in _of_several(engine, runs):
                yield added
    finally:
        timer.cancel()


def end(engine: NativeEngine, runs: Sequence[Run], why: str) -> None:
    """Ends runs with the tokens that they have."""
    for run in runs:
        for choice in run.choices:
            choice.why = why
        engine.abort(run.request.request_id)


async def _of_one(engine: NativeEngine, run: Run) -> AsyncGenerator[list[Addition], None]:
    deltas = engine.stream(run.request)
    try:
        async for new in deltas:
            yield _read(engine, run, new)
    finally:
        await deltas.aclose()


def _read(engine: NativeEngine, run: Run, deltas: Sequence[Delta]) -> list[Addition]:
    (choice,) = run.choices
    stopped = choice.stopped
    added = choice.feed(deltas)
    if choice.stopped and not stopped and added.finish is None:
        engine.abort(run.request.request_id)
    return [added]


async def _of_several(engine: NativeEngine, runs: Sequence[Run]) -> AsyncGenerator[list[Addition], None]:
    queue: asyncio.Queue[list[Addition] | None] = asyncio.Queue(_WAITING)

    async def read(run: Run) -> None:
        async for added in _of_one(engine, run):
            await queue.put(added)

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    group.create_task(read(run))
        finally:
            await queue.put(None)

    task = asyncio.create_task(read_all())
    try:
        while (added := await queue.get()) is not None:
            yield added
        await task
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, BaseExceptionGroup):
            await task
