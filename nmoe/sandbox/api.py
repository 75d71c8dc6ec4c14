"""What a sandbox offers to tools, tasks and graders: calls with limits, files of its workspace, an end that leaves nothing.

One sandbox belongs to one trajectory. Inside it the workspace is `/workspace`, which with `/tmp` and `/dev/shm` lies on one sized
tmpfs; nothing else is writable, nothing of the host's data is visible, and there is no network.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from nmoe.errors import UserError
from nmoe.types import Failure

WORKSPACE = "/workspace"


@dataclass(frozen=True)
class Limits:
    """What one call may use. `disk_mb` belongs to the sandbox: it is fixed when one is opened.

    `cpu_s`, `memory_mb` and `processes` are those of the whole process tree; threads count as processes. Memory that files on
    the tmpfs take is bounded by `disk_mb`, apart from `memory_mb`. `file_mb` is the largest size of one file, `output_kb` the
    largest sum of what is written to standard output and error.

    A call may take up to `starved_s` longer than `wall_s`, by as much as it was starved: ready to run while others had the CPUs.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    processes: int = 64
    file_mb: int = 64
    disk_mb: int = 64
    output_kb: int = 64
    starved_s: float = 0.0


@dataclass(frozen=True)
class Result:
    """How a call ended. `print(1)` gives

        Result(failure="ok", exit_code=0, stdout=b"1\\n", stderr=b"", wall_s=0.002)

    `failure` is "ok", "timeout" (wall clock or CPU), "out_of_memory", "output_limit", "disk_full", "sandbox_denied",
    "command_not_found", "nonzero_exit", or "internal_error" where the sandbox itself was lost. `exit_code` is minus the number of
    the signal that ended the command, and None where the sandbox stopped it. The output is what came until then, never more
    than `output_kb`. `cpu_s` is the CPU time of the whole process tree; `starved_s` how long it was ready to run while others had
    the CPUs, measured only where the limits have `starved_s`.
    """

    failure: Failure
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float = 0.0
    starved_s: float = 0.0


class SandboxSetupError(UserError):
    """The required level cannot be had on this machine; the message says what to install or enable."""


class SandboxFileError(Exception):
    """A file of the workspace could not be read or written.

    `failure`: "sandbox_denied" (outside the workspace or the paths that are allowed, through a link, no regular file),
    "output_limit" (larger than what may be read), "disk_full", "tool_error" (no such file), "internal_error".
    """

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Sandbox(Protocol):
    """The sandbox of one trajectory, an asynchronous context manager. One call runs at a time; others wait.

    When a call ends, by itself or by a limit, every process that it started is dead: what it left in the workspace stays, and the
    working directory is inherited by the next call. A call that is cancelled closes the sandbox.
    """

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", limits: Limits | None = None, cwd: str | None = None
    ) -> Result:
        """Runs a command. `cwd`, relative to the last one, is kept for the calls that follow."""

    async def bash(self, script: str, *, limits: Limits | None = None) -> Result:
        """Runs a script by bash; the directory that it ends in is the next call's, as in a shell that stays open."""

    async def python(self, code: str, *, limits: Limits | None = None, channel: socket.socket | None = None) -> Result:
        """Runs code in a fresh state of an interpreter that is already there; milliseconds. An `os.chdir` is inherited.

        The code finds `channel`, a connected socket, as its file descriptor 3.
        """

    async def read(self, path: str) -> bytes:
        """A regular file beneath the workspace, not larger than `file_mb`. Raises SandboxFileError."""

    async def read_lines(self, path: str, first: int, count: int, *, limits: Limits | None = None) -> Result:
        """`count` lines of a regular file from line `first`, counted from 1, found inside the sandbox: a file of any size costs the
        caller `output_kb` at most, and the result ends as "output_limit" where that cuts them. Raises SandboxFileError."""

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        """Replaces the one place where `old` stands in a regular file, inside the sandbox. Raises SandboxFileError, as a
        "tool_error" where it does not stand there exactly once."""

    async def write(self, path: str, data: bytes) -> None:
        """Replaces or makes a file beneath the workspace, directories included. Raises SandboxFileError."""

    async def restrict(self, access: Access) -> None:
        """Gives the calls that follow, `read` and `write` among them, these rights on the workspace and no others. Raises
        SandboxFileError."""

    async def close(self) -> None:
        """Kills what runs and frees everything the sandbox held. Safe to call twice."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class OpensSandboxes(Protocol):
    """Where sandboxes come from, each with a copy of the files of `workspace`."""

    async def open(self, workspace: Path | None = None) -> Sandbox:
        """Raises SandboxSetupError where it cannot be had, UserError or SandboxFileError for files that do not go in."""


@dataclass(frozen=True)
class Access:
    """The parts of the workspace that a trajectory may touch, as paths relative to it; held by the kernel for every call.

    `Access(read=(".",), write=("src", "notes.txt"))` reads everything and writes below `src` and one file. None is everything.
    What may be written may be read. A path that is not there when the sandbox opens is made as a directory.
    """

    read: tuple[str, ...] | None = None
    write: tuple[str, ...] | None = None
