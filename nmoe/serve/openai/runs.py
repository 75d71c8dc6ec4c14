"""Runs the engine's requests behind one request of a client, and reads their samples as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nmoe.engine.api import Delta, Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.server.events import EventStream
from nmoe.serve.openai.reading import Addition, Choice


@dataclass(frozen=True)
class Run:
    """A request to the engine, and the choices that read its samples, by their index in it."""

    request: Request
    choices: Sequence[Choice]

    @property
    def tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)


class Steps:
    """What the engine adds to the choices of runs, from now on. After `seconds` the runs end with the tokens so far."""

    def __init__(self, engine: NativeEngine, runs: Sequence[Run], seconds: float) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._new = list[tuple[Run, list[Delta]]]()
        self._waiter: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(seconds, end, engine, runs, "deadline")
        self._running = {engine.follow(run.request, partial(self._put, run)): run for run in runs}
        self._error: BaseException | None = None
        self._stream: EventStream | None = None
        for ended in self._running:
            ended.add_done_callback(self._end)

    async def take(self) -> list[Addition]:
        """Returns what has been added since the last time, after waiting for something; nothing at the end. Raises UserError as
        the engine does, and RuntimeError if it fails."""
        while not self._new:
            if self._error is not None:
                raise self._error
            if not self._running:
                return []
            self._waiter = self._loop.create_future()
            await self._waiter
        new, self._new = self._new, []
        if len(new) == 1:
            return _read(self._engine, *new[0])
        together = dict[int, tuple[Run, list[Delta]]]()
        for run, deltas in new:
            together.setdefault(id(run), (run, []))[1].extend(deltas)
        return [added for run, deltas in together.values() for added in _read(self._engine, run, deltas)]

    def push_into(self, stream: EventStream, chunks: Callable[[Sequence[Addition]], bytes]) -> None:
        """Has a stream, whose generator takes from here, send the `chunks` of each addition as soon as it comes, where all before
        is sent. Several runs are left to `take`: their additions belong into one message."""
        if len(self._running) == 1:
            self._stream, self._chunks = stream, chunks

    async def close(self) -> None:
        """Ends the runs that still run."""
        self._timer.cancel()
        self._stream = None  # which holds these steps: a cycle
        if self._running:
            for run in self._running.values():
                self._engine.abort(run.request.request_id)
            await asyncio.wait(list(self._running))

    def _put(self, run: Run, deltas: list[Delta]) -> None:
        stream, waiter = self._stream, self._waiter
        # While `take` waits, nothing is left from before.
        if stream is not None and stream.free and waiter is not None and not waiter.done():
            try:
                if data := self._chunks(_read(self._engine, run, deltas)):
                    stream.push(data)
                return
            except Exception as error:  # the other streams of this step go on
                self._error = error
        else:
            self._new.append((run, deltas))
        self._wake()

    def _end(self, ended: asyncio.Future[object]) -> None:
        del self._running[ended]
        self._error = self._error or (asyncio.CancelledError() if ended.cancelled() else ended.exception())
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
