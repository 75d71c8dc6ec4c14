"""The factory of sandboxes: tests the machine once, starts sandboxes ahead of need, and gives each its own uid."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.runs.waiting import wait_for
from nmoe.sandbox.api import WORKSPACE, Access, Limits, SandboxSetupError
from nmoe.sandbox.cgroups import cgroups_of
from nmoe.sandbox.interpreter import interpreter_of
from nmoe.sandbox.probe import probe
from nmoe.sandbox.process import ProcessSandbox, Starter
from nmoe.sandbox.uids import free_uid, has_uids
from nmoe.sandbox.warm import WarmSandboxes
from nmoe.sandbox.workspace import entries_of

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
    """Opens sandboxes of one level, all with the same disk and the same default limits.

    `close` ends the unused ones; each open sandbox is closed by its owner.
    """

    def __init__(self, settings: SandboxSettings | None = None, limits: Limits | None = None) -> None:
        """Starts one sandbox and tries to escape from it. Raises SandboxSetupError, with a remedy, if the level does not hold."""
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
        """The protections in force, in one line, for the log and for records of workspaces."""
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
        """Opens a fresh sandbox with a copy of the files of `workspace`.

        Raises SandboxSetupError if it does not start, UserError for a workspace that cannot be read, SandboxFileError for one
        that does not fit its disk.
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
        """Ends the unused sandboxes and opens no more."""
        self._closed = True
        await asyncio.to_thread(self.warm.close)
        await asyncio.to_thread(self._starter.close)

    async def open_cold(self) -> ProcessSandbox:
        """Starts a sandbox now, instead of taking one started ahead. Raises SandboxSetupError."""
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
