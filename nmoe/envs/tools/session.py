"""The state shared by one trajectory's tools: its start time and its sandbox, opened at the first request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from nmoe.envs.tools.servers import Connection, ToolServer
from nmoe.errors import UserError
from nmoe.sandbox.api import Access, OpensSandboxes, Sandbox, SandboxFileError, SandboxSetupError
from nmoe.sandbox.workspaces.prepare import Prepared
from nmoe.sandbox.workspaces.sources import WorkspaceError


class ToolSession:
    """The sandbox of one trajectory, in an asynchronous context whose end closes the sandbox and kills everything that still runs
    in it.

    `workspace` provides the sandbox's initial files and is called once; `files`, by path, are the problem's own and are added
    to them. `access` lists the parts of the workspace that calls may touch, until `lift` removes the limits. `sandboxes` also
    opens the sandboxes of the trajectory's verifier. `servers` are the trajectory's connections to tool servers. `lost` means
    that a call which held the sandbox was cancelled: the sandbox's state is then unknown, and a call that ran inside has closed
    it.
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
        self.access = access
        self.servers: dict[ToolServer, Connection] = {}
        self._opening = asyncio.Lock()

    async def prepare(self) -> None:
        """Creates the trajectory's workspace at the first call, if the environment has one. Raises WorkspaceError."""
        if self._workspace is not None and self.prepared is None:
            self.prepared = await self._workspace()

    async def sandbox(self) -> Sandbox:
        """Returns the trajectory's sandbox, which the first call opens. Raises SandboxSetupError if it cannot be opened, and
        WorkspaceError if its files cannot be provided.
        """
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
        """Lifts the limits of `access` after the policy's last call, so that the verifier can restore and read any file."""
        if self.opened is not None and not self.lost:
            with suppress(SandboxFileError):  # a sandbox that is gone needs no lifting
                await self.opened.restrict(Access())

    async def _open_with(self, sandboxes: OpensSandboxes, tree: Path | None) -> Sandbox:
        try:
            sandbox = await sandboxes.open(tree)
            try:
                for path, content in self._files.items():
                    await sandbox.write(path, content)
                if self.access is not None:
                    # After the files: a path that does not exist yet would become a directory.
                    await sandbox.restrict(self.access)
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
        for connection in self.servers.values():
            connection.end()
        if self.opened is not None:
            await self.opened.close()
