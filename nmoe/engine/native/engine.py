"""The native engine: asyncio in front, the step machine on a thread of its own behind.

Requests that tasks make in the same turn of the event loop reach the core together and in order: what a batch holds then does
not depend on how fast a thread wakes, and a synchronous run repeats to the bit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

from nmoe.engine.api import Delta, EngineStats, Request, Sample
from nmoe.engine.native.core import EngineCore, Job
from nmoe.model.transformer import Transformer

_OnToken = Callable[[int, Delta], None]


class NativeEngine:
    """An `Engine` over the learner's own module. Close it, or use it as a context manager, to end its thread.

    Only that thread touches the core: everything asked of it is an action in its inbox, done between two steps.
    """

    def __init__(self, model: Transformer, max_sequences: int) -> None:
        self._core = EngineCore(model, max_sequences)
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._closed = False
        self._error: BaseException | None = None
        self._outbox: list[Callable[[], None]] = []
        self._futures: dict[int, asyncio.Future[list[Sample]]] = {}
        self._thread = threading.Thread(target=self._work, name="nmoe-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> NativeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread after the step under way. Requests still running are cancelled."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        for future in self._futures.values():
            if not future.get_loop().is_closed():
                future.get_loop().call_soon_threadsafe(future.cancel)

    async def generate(self, request: Request) -> list[Sample]:
        """The request's n samples, in order of their index. Raises UserError where it can never fit the context."""
        return await self._submit(request, None)

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """The tokens of a request with n = 1 as they are sampled."""
        if request.n != 1:
            raise ValueError("stream gives one sample: n must be 1")
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()

        def on_token(index: int, delta: Delta) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, delta)

        samples = self._submit(request, on_token)
        samples.add_done_callback(lambda _: deltas.put_nowait(None))
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
        finally:
            self.abort(request.request_id)
            await samples

    def abort(self, request_id: str) -> None:
        """Ends a request, if it still runs; whoever waits for it gets what it has, marked "abort"."""

        def end() -> None:
            for job in self._core.abort(request_id):
                self._finish(job)

        self._post(end)

    async def update_weights(self, source: Transformer, version: int) -> None:
        """The learner's module is the engine's, so only the version changes: tokens sampled from here on carry it."""
        if source is not self._core.model:
            raise ValueError("the native engine runs the learner's own module; it takes weights from no other")
        loop = asyncio.get_running_loop()
        committed: asyncio.Future[None] = loop.create_future()

        def commit() -> None:
            self._core.version = version
            loop.call_soon_threadsafe(committed.set_result, None)

        self._post(commit)
        await committed

    def stats(self) -> EngineStats:
        return self._core.stats()

    def _submit(self, request: Request, on_token: _OnToken | None) -> asyncio.Future[list[Sample]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Sample]] = loop.create_future()
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append(partial(self._add, request, on_token, future))
        return future

    def _flush(self) -> None:
        actions, self._outbox = self._outbox, []
        self._post(*actions)

    def _post(self, *actions: Callable[[], None]) -> None:
        with self._wake:
            if self._error is not None:
                raise RuntimeError("the engine has stopped after an error") from self._error
            self._inbox += actions
            self._wake.notify()

    def _add(self, request: Request, on_token: _OnToken | None, future: asyncio.Future[list[Sample]]) -> None:
        try:
            job = self._core.add(request, on_token)
        except Exception as error:
            future.get_loop().call_soon_threadsafe(_fail, future, error)
        else:
            self._futures[id(job)] = future

    def _finish(self, job: Job) -> None:
        future = self._futures.pop(id(job))
        samples = [sample for sample in job.samples if sample is not None]
        future.get_loop().call_soon_threadsafe(_resolve, future, samples)

    def _work(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._inbox or not self._core.idle)
                    if self._closed:
                        return
                    actions, self._inbox = self._inbox, []
                for action in actions:
                    action()
                if not self._core.idle:
                    for job in self._core.step():
                        self._finish(job)
        except BaseException as error:
            # Whoever waits must hear of it: a dead thread would leave the rollout hanging.
            with self._wake:
                self._error = error
            for future in self._futures.values():
                future.get_loop().call_soon_threadsafe(_fail, future, error)


def _resolve(future: asyncio.Future[list[Sample]], samples: list[Sample]) -> None:
    if not future.done():
        future.set_result(samples)


def _fail(future: asyncio.Future[list[Sample]], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
