"""The host's side of a sandbox: starts the agent's process, exchanges one request at a time over the control socket, and closes
it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from nmoe.errors import UserError
from nmoe.sandbox.api import Access, Limits, Result, SandboxFileError
from nmoe.sandbox.cgroups import Cgroup
from nmoe.sandbox.inside.protocol import SIZES, parse_answer, request
from nmoe.types import FAILURES, Failure

# The agent keeps the time. This long after its deadline the host gives it up.
_GRACE_S = 2.0
_MAX_HEADER = 256
_CREDENTIALS = struct.Struct("iii")

Entry = tuple[str, str, int]  # path, "directory" | "file" | "link", mode


class LostError(Exception):
    """Raised if the agent is gone, or sent an invalid answer."""


@dataclass
class Process:
    """A started agent: pidfds of the launcher (bwrap, or the agent's parent) and of the agent, and the control socket."""

    launcher: int
    control: socket.socket
    agent: int = -1

    def kill(self) -> None:
        """Kills the agent; the kernel then kills everything else in its pid namespace. May be called twice.

        The socket is shut down, not closed, so that a waiting reader sees the end.
        """
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        if self.agent >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.agent, signal.SIGKILL)
            os.close(self.agent)
            self.agent = -1
        elif self.launcher >= 0:
            # Not yet an agent, so the launcher's end may not stop it; the socket's end does.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.launcher, signal.SIGKILL)

    async def ended(self) -> None:
        """Waits for the end of the launcher, which outlives everything in the sandbox."""
        launcher, self.launcher = self.launcher, -1
        if launcher >= 0:
            try:
                await _readable(launcher)
            finally:
                os.close(launcher)


class Starter:
    """Runs the process that forks launchers (`nmoe.sandbox.inside.server`), from the first request on; starts it again if it has
    ended."""

    def __init__(self, python: str, root: str, environment: dict[str, str]) -> None:
        code = f"import sys; sys.path.insert(0, {root!r}); from nmoe.sandbox.inside import server; server.main()"
        self._command = [python, "-S", "-s", "-P", "-c", code]
        self._environment = environment
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    async def start(self, plan: dict[str, Any], deadline_s: float) -> Process:
        """Starts an agent by `plan` and waits until it is ready, at most `deadline_s`. Raises OSError with the launcher's
        message."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        said, say = os.pipe()
        try:
            process = Process(self._launch(plan, theirs.fileno(), say), ours)
        except BaseException:
            ours.close()
            os.close(said)
            raise
        finally:
            theirs.close()
            os.close(say)
        try:
            async with asyncio.timeout(deadline_s):
                try:
                    process.agent = os.pidfd_open(await _greeted(ours))
                except (LostError, OSError):
                    process.kill()
                    await process.ended()
                    raise OSError(_text(said) or "the launcher ended without a word") from None
        except BaseException as error:
            process.kill()
            await asyncio.shield(process.ended())
            ours.close()
            if isinstance(error, TimeoutError):
                raise OSError(f"it was not ready after {deadline_s:g} seconds") from None
            raise
        finally:
            os.close(said)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return process

    def close(self) -> None:
        """Ends the forking process. Sandboxes that it started keep running."""
        with self._lock:
            if self._server is not None and self._requests is not None:
                self._requests.close()
                self._server.wait()
                self._server = self._requests = None

    def _launch(self, plan: dict[str, Any], control: int, errors: int) -> int:
        """Forks a launcher with these descriptors and returns its pidfd. Takes about as long as a fork."""
        with self._lock:
            if self._requests is None or self._server is None or self._server.poll() is not None:
                self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._server = subprocess.Popen(
                        self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=self._environment, cwd="/"
                    )
            socket.send_fds(self._requests, [repr(plan).encode()], [control, errors])
            _, descriptors, _, _ = socket.recv_fds(self._requests, 16, 1)
        if not descriptors:
            raise OSError("the process that starts sandboxes has ended")
        return descriptors[0]


async def _greeted(control: socket.socket) -> int:
    """Waits for the agent's first message, and returns its pid in this process's namespace, from the credentials that the kernel
    attaches."""
    await _readable(control)
    first, ancillary, _, _ = control.recvmsg(SIZES.size, socket.CMSG_SPACE(_CREDENTIALS.size))
    if len(first) != SIZES.size or not ancillary:
        raise LostError
    await _receive(control, sum(SIZES.unpack(first)))
    return int(_CREDENTIALS.unpack(ancillary[0][2])[0])


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _readable(waited_for: socket.socket | int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(waited_for, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(waited_for)


async def _receive(control: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        part = await loop.sock_recv(control, min(size - len(data), 1 << 20))
        if not part:
            raise LostError
        data += part
    return bytes(data)


def _text(descriptor: int) -> str:
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, 4096).decode(errors="replace").strip()
    return ""


class ProcessSandbox:
    """A `Sandbox` (nmoe.sandbox.api) that an agent process runs."""

    def __init__(
        self, process: Process, limits: Limits, uid_lock: socket.socket | None, cgroup: Cgroup | None = None
    ) -> None:
        """Takes over a started agent.

        `limits` apply to calls that name none. When the last process is gone, `uid_lock` is closed and `cgroup` removed.
        """
        self._process: Process | None = process
        self._limits = limits
        self._uid_lock = uid_lock
        self._cgroup = cgroup
        self._lock = asyncio.Lock()
        self._lost: Failure = "internal_error"

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", limits: Limits | None = None, cwd: str | None = None
    ) -> Result:
        if not argv:
            raise ValueError("an empty command")
        return await self._call({"op": "run", "argv": list(argv), "cwd": cwd}, [stdin], limits)

    async def bash(self, script: str, *, limits: Limits | None = None) -> Result:
        return await self._call({"op": "bash", "script": script}, [], limits)

    async def python(
        self, code: str, *, stdin: bytes = b"", limits: Limits | None = None, channel: socket.socket | None = None
    ) -> Result:
        return await self._call({"op": "python"}, [code.encode(errors="replace"), stdin], limits, channel)

    async def read(self, path: str) -> bytes:
        result = await self._call({"op": "read", "path": path}, [], self._file_limits())
        return self._done(result).stdout

    async def read_lines(self, path: str, first: int, count: int, *, limits: Limits | None = None) -> Result:
        header = {"op": "read_lines", "path": path, "first": first, "count": count}
        result = await self._call(header, [], limits)
        return result if result.failure == "output_limit" else self._done(result)

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        self._done(await self._call({"op": "edit", "path": path}, [old, new], self._file_limits()))

    async def write(self, path: str, data: bytes) -> None:
        self._done(await self._call({"op": "write", "path": path}, [data], self._file_limits()))

    async def put(self, entries: Sequence[Entry], blobs: Sequence[bytes]) -> None:
        """Creates files, directories and links in the workspace, replacing existing ones. Raises SandboxFileError."""
        self._done(await self._call({"op": "put", "entries": entries}, blobs, self._file_limits()))

    async def restrict(self, access: Access) -> None:
        self._done(await self._call({"op": "access", "read": access.read, "write": access.write}, [], None))

    async def close(self) -> None:
        process = await self._end()
        if process is not None:
            async with self._lock:
                # A running call has seen the end by now.
                process.control.close()

    async def _end(self) -> Process | None:
        """Kills the processes and frees cgroup and uid. Returns the process, with its socket still open; None if it was ended
        before."""
        process, self._process = self._process, None
        if process is not None:
            if self._cgroup is not None:
                self._cgroup.kill()
            process.kill()
            try:
                await asyncio.shield(process.ended())
            finally:
                if self._cgroup is not None:
                    await asyncio.to_thread(self._cgroup.remove)  # may wait for the kernel
                if self._uid_lock is not None:
                    self._uid_lock.close()
        return process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _file_limits(self) -> Limits:
        # A file is read as output, so the output limit is the size of a file.
        limits = asdict(self._limits)
        limits.update(output_kb=self._limits.file_mb * 1024, wall_s=max(10.0, self._limits.wall_s))
        return Limits(**limits)

    def _done(self, result: Result) -> Result:
        if result.failure != "ok":
            failure: Failure = "tool_error" if result.failure == "nonzero_exit" else result.failure
            raise SandboxFileError(failure, result.stderr.decode(errors="replace").strip() or failure)
        return result

    async def _call(
        self,
        header: dict[str, Any],
        blobs: Sequence[bytes],
        limits: Limits | None,
        channel: socket.socket | None = None,
    ) -> Result:
        limits = limits or self._limits
        async with self._lock:
            process, began = self._process, time.monotonic()
            if process is None:
                return Result(self._lost, None, b"", b"the sandbox is closed", 0.0)
            message = request({**header, "limits": asdict(limits)}, blobs)
            killed = 0
            try:
                if self._cgroup is not None:
                    self._cgroup.limit(limits, len(message))
                    killed = self._cgroup.kills()
                async with asyncio.timeout(limits.wall_s + limits.starved_s + _GRACE_S):
                    result = await self._exchange(process.control, message, channel, limits)
                if self._cgroup is not None and self._cgroup.kills() > killed:
                    result = replace(result, failure="out_of_memory", exit_code=None)
                return result
            except (TimeoutError, LostError, OSError, ValueError) as error:
                # A late agent is held up by the code that it runs; a missing one was killed by something else.
                self._lost = "timeout" if isinstance(error, TimeoutError) else self._why_lost(killed)
                if await self._end() is not None:
                    process.control.close()
                return Result(self._lost, None, b"", b"the sandbox was lost", time.monotonic() - began)
            except BaseException:
                if await self._end() is not None:
                    process.control.close()
                raise

    def _why_lost(self, killed: int) -> Failure:
        """Returns the failure of a call whose sandbox was lost. `killed` is the number of processes killed for lack of memory
        before the call."""
        with contextlib.suppress(OSError):
            if self._cgroup is not None and self._cgroup.kills() > killed:
                return "out_of_memory"
        return "internal_error"

    async def _exchange(
        self, control: socket.socket, message: bytes, channel: socket.socket | None, limits: Limits
    ) -> Result:
        loop = asyncio.get_running_loop()
        if channel is not None:
            socket.send_fds(control, [message[: SIZES.size]], [channel.fileno()])
            message = message[SIZES.size :]
        await loop.sock_sendall(control, message)
        header, body = SIZES.unpack(await _receive(control, SIZES.size))
        if header > _MAX_HEADER or body > limits.output_kb * 1024:
            raise LostError
        line = await _receive(control, header)
        failure, exit_code, times, out, err = parse_answer(line, await _receive(control, body))
        if failure not in FAILURES:
            raise LostError
        return Result(failure, exit_code, out, err, *times)


def entries_of(directory: Path, most_mb: int) -> tuple[list[Entry], list[bytes]]:
    """Lists every directory, file and symbolic link below `directory`, parents first, and returns these entries and for each the
    file's content or the link's text.

    A link is copied as a link, even a dangling one. Raises UserError for an entry of another kind or one that cannot be read, and
    if the files are larger than `most_mb`.
    """
    entries: list[Entry] = []
    blobs: list[bytes] = []
    room = most_mb << 20

    def walk(above: str) -> None:
        nonlocal room
        with os.scandir(directory / above) as found:
            for one in sorted(found, key=lambda entry: entry.name):
                path = f"{above}{one.name}"
                status = one.stat(follow_symlinks=False)
                mode = stat.S_IMODE(status.st_mode) & 0o777
                if one.is_symlink():
                    entries.append((path, "link", mode))
                    blobs.append(os.fsencode(os.readlink(one.path)))
                elif one.is_dir(follow_symlinks=False):
                    entries.append((path, "directory", mode))
                    blobs.append(b"")
                    walk(f"{path}/")
                elif stat.S_ISREG(status.st_mode):
                    room -= status.st_size
                    if room < 0:
                        raise UserError(
                            f"workspace {directory}: its files have more than {most_mb} MB, the sandbox's disk; raise the "
                            "budget's disk or leave files out"
                        )
                    entries.append((path, "file", mode))
                    with open(one.path, "rb", opener=_not_a_link) as file:
                        blobs.append(file.read())
                else:
                    raise UserError(f"workspace {directory}: {path} is not a file, directory or link; remove it")

    try:
        walk("")
    except OSError as error:
        raise UserError(f"workspace {directory}: {error.filename}: {error.strerror}") from error
    return entries, blobs


def _not_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
