"""Runs the engine's requests behind one request of a client, and reads their samples as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
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
    def tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)


async def steps(engine: NativeEngine, runs: Sequence[Run], seconds: float) -> AsyncGenerator[list[Addition], None]:
    """Yields what each step of the engine adds to the choices. After `seconds` the runs end with the tokens so far."""
    timer = asyncio.get_running_loop().call_later(seconds, end, engine, runs, "deadline")
    try:
        if len(runs) > 1:
            async with aclosing(_of_several(engine, runs)) as several:
                async for added in several:
                    yield added
            return
        # Not through `_of_one`, because each generator that a token passes costs a microsecond.
        (run,) = runs
        stream = engine.stream(run.request)
        try:
            async for deltas in stream:
                yield _read(engine, run, deltas)
        finally:
            await stream.aclose()
    finally:
        timer.cancel()


def end(engine: NativeEngine, runs: Sequence[Run], why: str) -> None:
    """Ends runs with the tokens so far."""
    for run in runs:
        for choice in run.choices:
            choice.why = why
        engine.abort(run.request.request_id)


def _read(engine: NativeEngine, run: Run, deltas: Sequence[Delta]) -> list[Addition]:
    if run.request.samples == 1:
        return [_read_sample(engine, run, 0, deltas)]
    return [_read_sample(engine, run, index, of_sample) for index, of_sample in _by_sample(deltas).items()]


def _by_sample(deltas: Sequence[Delta]) -> dict[int, list[Delta]]:
    samples: dict[int, list[Delta]] = {}
    for delta in deltas:
        samples.setdefault(delta.index, []).append(delta)
    return samples


def _read_sample(engine: NativeEngine, run: Run, index: int, deltas: Sequence[Delta]) -> Addition:
    choice = run.choices[index]
    stopped = choice.stopped
    added = choice.feed(deltas)
    if choice.stopped and not stopped and added.finish is None:
        engine.abort(run.request.request_id, index)
    return added


async def _of_several(engine: NativeEngine, runs: Sequence[Run]) -> AsyncGenerator[list[Addition], None]:
    # `room` bounds the steps, so that the end can be put into the queue also where nothing takes them any more.
    queue: asyncio.Queue[list[Addition] | None] = asyncio.Queue()
    room = asyncio.Semaphore(_WAITING)

    async def read(run: Run) -> None:
        stream = engine.stream(run.request)
        try:
            async for deltas in stream:
                await room.acquire()
                queue.put_nowait(_read(engine, run, deltas))
        finally:
            await stream.aclose()

    async def read_all() -> None:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(read(run))

    task = asyncio.create_task(read_all())
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (added := await queue.get()) is not None:
            room.release()
            yield added
        await task
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, BaseExceptionGroup):
            await task
