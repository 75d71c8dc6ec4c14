"""Coroutines side by side, of which none goes on after one has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What all of them return, in order. Where one raises, or the caller is cancelled, the others are cancelled and have ended when
    this returns."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
