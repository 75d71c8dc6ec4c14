"""A thread with an event loop, on which other threads and event loops run coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from nmoe.errors import UserError

R = TypeVar("R")


class Background:
    """Runs coroutines on an event loop in a thread, until `end`. Whoever waits then, or comes later, gets a UserError."""

    def __init__(self, name: str, closed: str = "") -> None:
        """Starts the thread. `name` is whose it is, and `closed` the error of who comes after its end."""
        self._said = closed
        self._loop = asyncio.new_event_loop()
        # Its holder may be the garbage collector, which can run a finalizer at any point of any thread.
        self._lock = threading.RLock()
        self.ended = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"nmoe-{name}", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def wait(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine, and returns its result."""
        future = self._future(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise self._closed() from None
        except BaseException:
            future.cancel()  # where the wait was interrupted
            raise

    async def awaited(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine for one of another event loop, with which it is cancelled, and returns its result."""
        try:
            return await asyncio.wrap_future(self._future(coroutine))
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            raise self._closed() from None

    def call(self, function: Callable[[], Any]) -> None:
        """Calls a function on the loop, unless it has ended."""
        with self._lock:
            if not self.ended:
                self._loop.call_soon_threadsafe(function)

    def end(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancels all that runs, waits until it has ended, runs `last`, and ends the thread. Not to be called from it."""
        with self._lock:
            self.ended = True
            ending = asyncio.run_coroutine_threadsafe(_ended(last), self._loop)
        try:
            ending.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _future(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        with self._lock:
            if self.ended:
                coroutine.close()
                raise self._closed()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _closed(self) -> UserError:
        return UserError(self._said)


async def _ended(last: Coroutine[Any, Any, None] | None) -> None:
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    if last is not None:
        await last
    await asyncio.get_running_loop().shutdown_asyncgens()
