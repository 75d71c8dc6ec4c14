"""What one trajectory's tools share: when it began, and its sandbox, opened when the first of them asks for it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, Self

from nmoe.rl.sandbox.api import Sandbox


class OpensSandboxes(Protocol):
    """Where sandboxes come from, one for each trajectory that needs one."""

    async def open(self) -> Sandbox: ...


class ToolSession:
    """An asynchronous context manager; its end closes the sandbox, which kills whatever still runs in it."""

    def __init__(self, sandboxes: OpensSandboxes | None) -> None:
        self.began = time.perf_counter()
        self.opened: Sandbox | None = None
        self._sandboxes = sandboxes
        self._opening = asyncio.Lock()

    async def sandbox(self) -> Sandbox:
        """The trajectory's sandbox. Raises SandboxSetupError where it can not be had."""
        async with self._opening:
            if self.opened is None:
                assert self._sandboxes is not None, (
                    "an environment with tools that want a sandbox knows where to open one"
                )
                self.opened = await self._sandboxes.open()
            return self.opened

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.opened is not None:
            await self.opened.close()
