"""Waits for coroutines: one from synchronous code, or several that are all cancelled as soon as one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

R = TypeVar("R")


def wait_for(coroutine: Coroutine[Any, Any, R]) -> R:
    """Runs a coroutine to its end in a new event loop, and returns its result or raises its exception.

    If this thread has a running event loop, as in a notebook, the new loop gets its own thread, because a thread can run only one.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy_context().run, asyncio.run, coroutine).result()


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Runs the coroutines concurrently and returns their results in order.

    If one raises, or the caller is cancelled, the others are cancelled and have ended before this function returns.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
