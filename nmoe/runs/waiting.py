"""Wait for a coroutine from code that is not asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

R = TypeVar("R")


def wait_for(coroutine: Coroutine[Any, Any, R]) -> R:
    """Runs a coroutine to its end in a new event loop, and returns its result or raises its exception.

    A notebook runs every cell within an event loop, and a thread runs one at a time: then the new one gets its own thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy_context().run, asyncio.run, coroutine).result()
