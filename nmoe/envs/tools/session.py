"""What one trajectory's tools share: when it began, and its sandbox, opened when the first of them asks for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from nmoe.errors import UserError
from nmoe.sandbox.api import Access, OpensSandboxes, Sandbox, SandboxFileError, SandboxSetupError
from nmoe.sandbox.workspaces.prepare import Prepared
from nmoe.sandbox.workspaces.sources import WorkspaceError


class ToolSession:
    """An asynchronous context manager; its end closes the sandbox, which kills whatever still runs in it.

    `workspace` gives the files that the sandbox starts with, asked once; `files`, by path, are the problem's own, added to
    them. `access` are the parts of the workspace that calls may touch, until `lift` ends that. `sandboxes` is also where the
    trajectory's verifier opens its own. `lost` says that a call which had been given the sandbox was cancelled: nobody knows what
    it left there, and one that ran inside has closed it.
    """

    def __init__(
        self,
        sandboxes: OpensSandboxes | None,
        workspace: Callable[[], Awaitable[Prepared]] | None = None,
        files: Mapping[str, bytes] | None = None,
        access: Access | None = None,
    ) -> None:
        self.began = time.perf_counter()
        self.opened: Sandbox | None = None
        self.prepared: Prepared | None = None
        self.lost = False
        self.sandboxes = sandboxes
        self._files = files or {}
        self._workspace = workspace
        self._access = access
        self._opening = asyncio.Lock()

    async def prepare(self) -> None:
        """Has the workspace made, where the environment has one. Raises WorkspaceError."""
        if self._workspace is not None and self.prepared is None:
            self.prepared = await self._workspace()

    async def sandbox(self) -> Sandbox:
        """The trajectory's sandbox. Raises SandboxSetupError where it cannot be had, WorkspaceError where its files cannot."""
        async with self._opening:
            if self.opened is None:
                assert self.sandboxes is not None, (
                    "an environment with tools that want a sandbox knows where to open one"
                )
                await self.prepare()
                tree = None if self.prepared is None else self.prepared.tree
                self.opened = await self._open_with(self.sandboxes, tree)
            return self.opened

    async def lift(self) -> None:
        """Ends the limits of `access`, when the policy has made its last call: the verifier restores and reads what it needs."""
        if self._access is not None and self.opened is not None and not self.lost:
            with suppress(SandboxFileError):  # a sandbox that is gone has nothing to give away
                await self.opened.restrict(Access())

    async def _open_with(self, sandboxes: OpensSandboxes, tree: Path | None) -> Sandbox:
        try:
            sandbox = await sandboxes.open(tree)
            try:
                for path, content in self._files.items():
                    await sandbox.write(path, content)
                if self._access is not None:
                    # After the files, for a path that is not there would become a directory.
                    await sandbox.restrict(self._access)
            except BaseException:
                await sandbox.close()
                raise
            return sandbox
        except SandboxSetupError:
            raise
        except (UserError, SandboxFileError) as error:
            raise WorkspaceError(f"the workspace does not go into the sandbox: {error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.opened is not None:
            await self.opened.close()
