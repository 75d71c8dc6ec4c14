"""Sandboxes started ahead of need, by a thread with its own event loop, because callers come from any loop or none."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from nmoe.errors import UserError
from nmoe.sandbox.process import ProcessSandbox


class WarmSandboxes:
    """Keeps `count` sandboxes ready from the first `take` on."""

    def __init__(self, count: int, start: Callable[[], Coroutine[Any, Any, ProcessSandbox]]) -> None:
        self._count = count
        self._start = start
        self._ready: list[ProcessSandbox] = []
        self._starting: set[Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> ProcessSandbox | None:
        """Takes a ready sandbox, or None, and starts missing ones in the background."""
        taken = self._ready.pop() if self._ready else None
        if self._count and self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon, so that a process can end without closing its sandboxes; they end with its sockets.
            self._thread = threading.Thread(target=self._loop.run_forever, name="nmoe-sandboxes", daemon=True)
            self._thread.start()
        for _ in range(self._count - len(self._ready) - len(self._starting)):
            assert self._loop is not None, "it was made above"
            future = asyncio.run_coroutine_threadsafe(self._start_one(), self._loop)
            self._starting.add(future)
            future.add_done_callback(self._starting.discard)
        return taken

    def wait(self) -> None:
        """Waits until the full number of sandboxes is ready."""
        for future in list(self._starting):
            future.result()

    def close(self) -> None:
        """Ends all ready sandboxes and those being started."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start_one(self) -> None:
        # A failure to start is not reported here; the next caller of open gets the same error.
        with contextlib.suppress(UserError):
            self._ready.append(await self._start())

    async def _end(self) -> None:
        starting = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        while self._ready:
            await self._ready.pop().close()
