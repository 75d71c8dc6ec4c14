"""A sandbox in memory: files in a dictionary, commands answered by script."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from nmoe.sandbox.api import Access, Limits, Result, SandboxFileError

DONE = Result("ok", 0, b"done\n", b"", 0.001)


class FakeSandbox:
    """Implements `nmoe.sandbox.api.Sandbox`."""

    def __init__(self, answers: Iterable[Result] = ()) -> None:
        self.contents: dict[str, bytes] = {}
        self.commands: list[list[str]] = []
        self.limits: list[Limits | None] = []
        self.closed = 0
        self.restrictions: list[tuple[Access, dict[str, bytes]]] = []
        self._answers = iter(answers)

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", limits: Limits | None = None, cwd: str | None = None
    ) -> Result:
        self.commands.append(list(argv))
        self.limits.append(limits)
        return next(self._answers, DONE)

    async def bash(self, script: str, *, limits: Limits | None = None) -> Result:
        return await self.run(["bash", "-c", script], limits=limits)

    async def python(
        self, code: str, *, stdin: bytes = b"", limits: Limits | None = None, channel: socket.socket | None = None
    ) -> Result:
        return await self.run(["python", "-c", code], limits=limits)

    async def read(self, path: str) -> bytes:
        if path not in self.contents:
            raise SandboxFileError("tool_error", f"{path}: no such file")
        return self.contents[path]

    async def read_lines(self, path: str, first: int, count: int, *, limits: Limits | None = None) -> Result:
        return Result("ok", 0, b"".join((await self.read(path)).splitlines(True)[first - 1 :][:count]), b"", 0.001)

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        content = await self.read(path)
        if content.count(old) != 1:
            raise SandboxFileError("tool_error", f"the text stands {content.count(old)} times in {path}, not once")
        self.contents[path] = content.replace(old, new)

    async def write(self, path: str, data: bytes) -> None:
        self.contents[path] = data

    async def restrict(self, access: Access) -> None:
        self.restrictions.append((access, dict(self.contents)))

    async def close(self) -> None:
        self.closed += 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class FakeSandboxes:
    """Opens the one sandbox that it is given, and counts."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self.sandbox = sandbox
        self.opened = 0
        self.workspaces: list[Path | None] = []

    async def open(self, workspace: Path | None = None) -> FakeSandbox:
        self.opened += 1
        self.workspaces.append(workspace)
        return self.sandbox
