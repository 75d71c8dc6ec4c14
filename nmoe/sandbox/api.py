"""The sandbox interface for tools, tasks and graders: calls with limits, access to files of the workspace, and cleanup without
remains.

One sandbox belongs to one trajectory. Inside it the workspace is `/workspace`, which shares one sized tmpfs with `/tmp` and
`/dev/shm`. Nothing else is writable, none of the host's data is visible, and there is no network.
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
    """The limits of one call. `disk_mb` is fixed for the whole sandbox when it is opened.

    `cpu_s`, `memory_mb` and `processes` apply to the whole process tree; threads count as processes. Files on the tmpfs count
    towards `disk_mb`, not `memory_mb`. `file_mb` is the largest size of one file, `output_kb` the largest sum of standard output
    and error. A call may exceed `wall_s` by its starved time (ready to run while other processes had the CPUs), but by no more than
    `starved_s`.
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
    r"""The outcome of a call. `print(1)` gives

        Result(failure="ok", exit_code=0, stdout=b"1\n", stderr=b"", wall_s=0.002)

    `failure` is "ok", "timeout" (wall clock or CPU), "out_of_memory", "output_limit", "disk_full", "sandbox_denied",
    "command_not_found", "nonzero_exit", or "internal_error" if the sandbox itself was lost. `exit_code` is minus the number of the
    signal that ended the command, if one did; None if the sandbox stopped it. The output until then is kept, at most `output_kb`.
    `cpu_s` is the CPU time of the whole process tree. `starved_s` is the time for which it was ready to run while other processes
    had the CPUs; it is measured only if the limits set `starved_s`.
    """

    failure: Failure
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float = 0.0
    starved_s: float = 0.0


class SandboxSetupError(UserError):
    """Raised if the required protection level is not available on this machine; the message says what to install or enable."""


class SandboxFileError(Exception):
    """Raised if a file of the workspace could not be read or written.

    `failure`: "sandbox_denied" (outside the workspace or the allowed paths, through a link, or not a regular file), "output_limit"
    (larger than the read limit), "disk_full", "tool_error" (no such file), "internal_error".
    """

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Sandbox(Protocol):
    """The sandbox of one trajectory, an asynchronous context manager. One call runs at a time; others wait.

    When a call ends, by itself or by a limit, every process that it started is dead. Its files in the workspace stay, and the next
    call begins in the working directory where it ended. Cancelling a call closes the sandbox.
    """

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", limits: Limits | None = None, cwd: str | None = None
    ) -> Result:
        """Runs a command. `cwd` is relative to the working directory of the last call, and later calls begin there."""

    async def bash(self, script: str, *, limits: Limits | None = None) -> Result:
        """Runs a bash script. The next call starts in the directory where it ends, as in a shell that stays open."""

    async def python(
        self, code: str, *, stdin: bytes = b"", limits: Limits | None = None, channel: socket.socket | None = None
    ) -> Result:
        """Runs Python code in a fresh copy of an interpreter that is already running, which takes milliseconds.

        An `os.chdir` also applies to the next call. `channel` is a connected socket, which the code finds as file descriptor 3.
        """

    async def read(self, path: str) -> bytes:
        """Returns the content of a regular file of the workspace, of at most `file_mb`. Raises SandboxFileError."""

    async def read_lines(self, path: str, first: int, count: int, *, limits: Limits | None = None) -> Result:
        """Returns `count` lines of a regular file from line `first`, counted from 1, as the output of a call.

        The lines are found inside the sandbox, so a file of any size costs the caller at most `output_kb`; the result ends as
        "output_limit" if that cuts the lines. Raises SandboxFileError.
        """

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        """Replaces the only occurrence of `old` in a regular file, inside the sandbox.

        Raises SandboxFileError: with "tool_error" unless `old` occurs exactly once.
        """

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file of the workspace, new or in place of an old one, and creates its directories. Raises SandboxFileError."""

    async def restrict(self, access: Access) -> None:
        """Restricts all later calls, `read` and `write` included, to these parts of the workspace. Raises SandboxFileError."""

    async def close(self) -> None:
        """Kills running processes and frees all resources of the sandbox. May be called twice."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class OpensSandboxes(Protocol):
    """A source of sandboxes, each with a copy of the files of `workspace`."""

    async def open(self, workspace: Path | None = None) -> Sandbox:
        """Opens a sandbox. Raises SandboxSetupError if it cannot start, UserError or SandboxFileError if files cannot be copied
        into it."""


@dataclass(frozen=True)
class Access:
    """The parts of the workspace that a trajectory may read and write, as relative paths, enforced by the kernel in every call.

    `Access(read=(".",), write=("src", "notes.txt"))` allows reading everything, and writing below `src` and one file. None allows
    everything. Writable paths are readable too. A path that does not exist when the sandbox opens is created as a directory.
    """

    read: tuple[str, ...] | None = None
    write: tuple[str, ...] | None = None
