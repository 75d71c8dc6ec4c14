"""Opens sandboxes: tests the machine once, starts sandboxes ahead of need, and gives each its own uid."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.errors import UserError
from nmoe.runs.waiting import wait_for
from nmoe.sandbox.api import WORKSPACE, Access, Limits, SandboxSetupError
from nmoe.sandbox.cgroups import cgroups_of
from nmoe.sandbox.interpreter import interpreter_of
from nmoe.sandbox.probe import probe
from nmoe.sandbox.process import ProcessSandbox, Starter, entries_of

_ROOT = str(Path(__file__).parents[2])
_START_DEADLINE_S = 20.0
_INODES_PER_MB = 256
# The whole environment of a process inside. The hash seed is fixed so that a replay iterates over sets in the same order.
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKSPACE,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    # Few arenas, because each reserves 64 MB of the limited address space.
    "MALLOC_ARENA_MAX": "2",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class Sandboxes:
    """Opens sandboxes of one protection level, all with the same disk size and default limits.

    `close` ends the unused ones; each open sandbox is closed by its owner.
    """

    def __init__(self, settings: SandboxSettings | None = None, limits: Limits | None = None) -> None:
        """Opens one sandbox and tests its protections (`probe`). Raises SandboxSetupError, with a remedy, if it cannot start or
        does not hold."""
        self.settings = settings or SandboxSettings()
        self.limits = limits or Limits()
        self.interpreter = interpreter_of(self.settings)
        # So that `python` in a script is the same interpreter.
        path = ":".join([*self.interpreter.directories, _ENVIRONMENT["PATH"]])
        self._starter = Starter(self.interpreter.python, _ROOT, {**_ENVIRONMENT, "PATH": path})
        self._bubblewrap = _find_bubblewrap() if self.settings.level == "bubblewrap" else None
        self._cgroups, self._cgroups_said = cgroups_of(self.settings)
        self.warm = WarmSandboxes(self.settings.warm, self.open_cold)
        self._closed = False
        try:
            wait_for(probe(self.open_cold, self.limits, self.interpreter, self.settings.level))
        except BaseException:
            self._starter.close()
            raise

    def describe(self) -> str:
        """Returns the protections in force as one line, for the log and for records of workspaces."""
        entered = (
            f"bubblewrap {_version(self._bubblewrap)}"
            if self._bubblewrap
            else "Landlock and namespaces, without bubblewrap"
        )
        own = has_uids(self.settings.first_uid)
        user = "its own uid each" if own else f"uid {os.getuid()} in a user namespace each"
        return (
            f"{entered}, seccomp, no network, {user}, memory and CPU time of the process tree watched every 20 ms, "
            f"{self._cgroups_said}, disk {self.limits.disk_mb} MB, Python {self.interpreter.python}"
        )

    async def open(self, workspace: Path | None = None, access: Access | None = None) -> ProcessSandbox:
        """Opens a fresh sandbox with a copy of the files of `workspace`, restricted to `access` if given.

        Raises SandboxSetupError if it does not start, UserError for a workspace that cannot be read, SandboxFileError for one that
        does not fit its disk.
        """
        if self._closed:
            raise RuntimeError("these sandboxes are closed")
        sandbox = self.warm.take() or await self.open_cold()
        try:
            if workspace is not None:
                await sandbox.put(*await asyncio.to_thread(entries_of, workspace, self.limits.disk_mb))
            if access is not None:
                await sandbox.restrict(access)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        """Ends the unused sandboxes; no more can be opened."""
        self._closed = True
        await asyncio.to_thread(self.warm.close)
        await asyncio.to_thread(self._starter.close)

    async def open_cold(self) -> ProcessSandbox:
        """Starts a new sandbox instead of taking one that was started ahead. Raises SandboxSetupError."""
        uid, lock = free_uid(self.settings.first_uid) if has_uids(self.settings.first_uid) else (None, None)
        plan = {
            "level": self.settings.level,
            "uid": uid,
            "disk_mb": self.limits.disk_mb,
            "inodes": self.limits.disk_mb * _INODES_PER_MB,
            "visible": self.interpreter.visible,
            "links": self.interpreter.links,
            "site": self.interpreter.site,
            "python": self.interpreter.python,
            "bubblewrap": self._bubblewrap,
        }
        cgroup = None
        try:
            if self._cgroups is not None:
                cgroup = self._cgroups.make(self.limits.disk_mb)
            plan["members"] = None if cgroup is None else cgroup.members
            process = await self._starter.start(plan, _START_DEADLINE_S)
        except BaseException as error:
            if cgroup is not None:
                cgroup.kill()
                await asyncio.to_thread(cgroup.remove)
            if lock is not None:
                lock.close()
            if isinstance(error, OSError):
                raise SandboxSetupError(_remedy(self.settings.level, str(error))) from None
            raise
        return ProcessSandbox(process, self.limits, lock, cgroup)


def _find_bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxSetupError(
            'sandbox_setup_failed: sandbox.level = "bubblewrap" needs bwrap, which is not installed; install the package '
            'bubblewrap (apt-get install bubblewrap), or choose level = "landlock"'
        )
    return found


def _version(bubblewrap: str) -> str:
    return subprocess.run([bubblewrap, "--version"], capture_output=True, text=True, check=False).stdout.split()[-1]


def _remedy(level: str, reason: str) -> str:
    return (
        f"sandbox_setup_failed: a sandbox of level {level!r} cannot be started: {reason}; it needs user namespaces "
        "(sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone = 1 where there is one; in a container "
        "a runtime that allows them, such as --security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
        + (", and Landlock (Linux 5.13 or newer, booted with lsm=landlock,...)" if level == "landlock" else "")
    )


class WarmSandboxes:
    """Keeps `count` sandboxes started and ready, from the first `take` on."""

    def __init__(self, count: int, start: Callable[[], Coroutine[Any, Any, ProcessSandbox]]) -> None:
        self._count = count
        self._start = start
        self._ready: list[ProcessSandbox] = []
        self._starting: set[Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> ProcessSandbox | None:
        """Takes a ready sandbox (None if there is none), and starts missing ones in the background."""
        taken = self._ready.pop() if self._ready else None
        if self._count and self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon, so that a process can end without closing its sandboxes; they end with its sockets.
            self._thread = threading.Thread(target=self._loop.run_forever, name="nmoe-sandboxes", daemon=True)
            self._thread.start()
        for _ in range(self._count - len(self._ready) - len(self._starting)):
            assert self._loop is not None, "it was made above"
            future = asyncio.run_coroutine_threadsafe(self._start_one(), self._loop)
            self._starting.add(future)
            future.add_done_callback(self._starting.discard)
        return taken

    def wait(self) -> None:
        """Waits until the full number of sandboxes is ready."""
        for future in list(self._starting):
            future.result()

    def close(self) -> None:
        """Ends all ready sandboxes and those being started."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start_one(self) -> None:
        # A failure to start is not reported here; the next caller of open gets the same error.
        with contextlib.suppress(UserError):
            self._ready.append(await self._start())

    async def _end(self) -> None:
        starting = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        while self._ready:
            await self._ready.pop().close()


_UIDS = 65536


def has_uids(first: int) -> bool:
    """Returns whether this process may give sandboxes other uids, which only root may.

    Raises SandboxSetupError for root of a user namespace that does not map the uid `first`.
    """
    if os.getuid() != 0:
        return False
    known = {kind: _known(kind) for kind in ("uid", "gid")}
    if all(first in ids for ids in known.values()):
        return True
    said = " and ".join(f"{kind}s {ids.start} to {ids.stop - 1}" for kind, ids in known.items())
    remedy = "start it as an ordinary user instead, without `unshare -r`"
    if all(len(ids) > 1 for ids in known.values()):
        remedy = f"name some of those, such as [sandbox] first_uid = {max(ids.start + len(ids) // 2 for ids in known.values())}"
    raise SandboxSetupError(
        f"sandbox_setup_failed: nmoe runs as root of a user namespace that knows {said} alone, and gives sandboxes the uids from "
        f"sandbox.first_uid = {first} on; {remedy}"
    )


def free_uid(first: int) -> tuple[int, socket.socket]:
    """Reserves a uid, `first` or above, that no live sandbox on this machine has; returns it and the socket that holds the
    reservation.

    The lock is an abstract socket's name, which is released when its process ends. Raises SandboxSetupError if no uid is free.
    """
    count = min(_UIDS, *(_known(kind).stop - first for kind in ("uid", "gid")))
    for uid in _round_from(first, count, os.getpid()):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0nmoe-sandbox-uid-{uid}")
        except OSError:
            lock.close()
        else:
            return uid, lock
    raise SandboxSetupError(f"sandbox_setup_failed: all {count} uids from {first} on are in use")


def _known(kind: str) -> range:
    """Returns the largest range of ids that this user namespace maps. `kind` is "uid" or "gid"."""
    with open(f"/proc/self/{kind}_map") as file:
        rows = [[int(field) for field in line.split()] for line in file]
    return max((range(inside, inside + count) for inside, _, count in rows), key=len, default=range(0))


def _round_from(first: int, count: int, offset: int) -> Iterator[int]:
    # Starts at an offset that depends on the process, so that the first try is usually free.
    for index in range(count):
        yield first + (offset * 61 + index) % count
