"""Concurrent coroutines that all stop as soon as one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


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
