"""Limits of memory, processes and CPU by cgroup v2: one cgroup per sandbox, below a directory that the host has delegated.

A cgroup holds all processes of its sandbox, including the agent. Moving a process takes about 11 ms. The launcher moves itself,
once, and no call waits for it. The kernel's Documentation/admin-guide/cgroup-v2.rst explains each file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.sandbox.api import Limits, SandboxSetupError

# A cgroup whose children have limits cannot hold processes itself; its processes move to this child.
_LEAF = "nmoe"
_PREFIX = "nmoe-sandbox-"
_CPU_PERIOD_US = 100_000
_MIB = 1 << 20
# Added for the launcher and the agent: their processes and their interpreters' memory.
_KEEPERS, _KEEPERS_MB = 2, 32
# How many copies of a request the agent's memory holds until the files are written.
_COPIES = 4


class NotDelegatedError(Exception):
    """Raised if no cgroup is available for limits; the message says why."""


def cgroups_of(settings: SandboxSettings) -> tuple[Cgroups | None, str]:
    """Returns the directory of cgroups for sandbox limits, None if only the agent enforces them; and a description for the log.

    Raises SandboxSetupError, with a remedy, if the settings require cgroups and there are none.
    """
    if settings.cgroup == "off":
        return None, "no cgroup limits (sandbox.cgroup is off)"
    try:
        found = Cgroups.claim(settings.cgroup_directory, settings.cpus)
    except NotDelegatedError as error:
        demands = {
            'sandbox.cgroup = "required"': settings.cgroup == "required",
            "sandbox.cgroup_directory": settings.cgroup_directory is not None,
            "sandbox.cpus": settings.cpus is not None,
        }
        demanded = [name for name, is_set in demands.items() if is_set]
        if demanded:
            raise SandboxSetupError(
                f"sandbox_setup_failed: {' and '.join(demanded)} cannot be had: {error}; start the command in a delegated cgroup, "
                'such as by `systemd-run --user --scope -p "Delegate=yes" nmoe ...` (docs/guides/sandbox.md), '
                "or leave these settings out"
            ) from None
        return None, f"no cgroup limits ({error})"
    return found, f"cgroup limits of memory and processes{'' if settings.cpus is None else f', {settings.cpus:g} CPUs'}"


@dataclass(frozen=True)
class Cgroups:
    """A directory of cgroups that is delegated to this user, whose children can be given limits.

    For example `/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope`.
    """

    directory: str
    cpus: float | None = None

    @classmethod
    def claim(cls, directory: str | None = None, cpus: float | None = None) -> Cgroups:
        """Prepares a delegated directory, by default this process's own cgroup, and tests a cgroup there. Raises NotDelegatedError.

        Processes in the directory itself move to its child `nmoe`. Cgroups left by killed runs are removed.
        """
        try:
            found = cls(directory or _own_directory(), cpus)
            with _locked(found.directory):
                found._enable(["memory", "pids", *([] if cpus is None else ["cpu"])])
                found._sweep()
            found._try_out()
        except OSError as error:
            raise NotDelegatedError(f"{error.strerror}: {error.filename}" if error.filename else str(error)) from None
        return found

    def make(self, disk_mb: int) -> Cgroup:
        """Creates a cgroup for one sandbox, whose disk has the given size. Raises OSError."""
        path = f"{self.directory}/{_PREFIX}{secrets.token_hex(8)}"
        with _locked(self.directory):
            os.mkdir(path)
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_SH)
        made = Cgroup(path, disk_mb, lock)
        try:
            if os.path.exists(f"{path}/memory.swap.max"):  # absent if the kernel does not account for swap
                _write(f"{path}/memory.swap.max", "0")
            if self.cpus is not None:
                _write(f"{path}/cpu.max", f"{round(self.cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}")
        except BaseException:
            made.remove()
            raise
        return made

    def _enable(self, controllers: list[str]) -> None:
        missing = set(controllers) - set(_read(f"{self.directory}/cgroup.controllers").split())
        if missing:
            raise NotDelegatedError(f"{self.directory} has no controller {' and '.join(sorted(missing))}")
        if set(controllers) <= set(_read(f"{self.directory}/cgroup.subtree_control").split()):
            return
        # The root of the hierarchy has no type, and may keep its processes.
        if os.path.exists(f"{self.directory}/cgroup.type"):
            leaf = f"{self.directory}/{_LEAF}"
            os.makedirs(leaf, exist_ok=True)
            while members := _read(f"{self.directory}/cgroup.procs").split():
                if "0" in members:
                    raise NotDelegatedError(
                        f"{self.directory} has processes of another pid namespace, which cannot be moved from here"
                    )
                for pid in members:
                    with contextlib.suppress(ProcessLookupError):
                        _write(f"{leaf}/cgroup.procs", pid)
        _write(f"{self.directory}/cgroup.subtree_control", " ".join(f"+{one}" for one in controllers))

    def _sweep(self) -> None:
        """Removes cgroups of sandboxes whose host process is gone, recognised by their lock being free."""
        for name in os.listdir(self.directory):
            if not name.startswith(_PREFIX):
                continue
            path = f"{self.directory}/{name}"
            try:
                lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another run has just closed this sandbox, which takes no lock of the directory
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                left = Cgroup(path, 0, lock)
                left.kill()
                left.remove()

    def _try_out(self) -> None:
        """Tests that a process can be moved to a cgroup, is listed there, and is killed with it. Raises NotDelegatedError or
        OSError."""
        made = self.make(disk_mb=0)
        try:
            made.limit(Limits())
            with subprocess.Popen(["/bin/sleep", "60"], stdin=subprocess.DEVNULL) as tried:
                try:
                    _write(made.members, str(tried.pid))
                    if str(tried.pid) not in _read(made.members).split():
                        raise NotDelegatedError(f"{made.path} does not keep a process that was put there")
                finally:
                    made.kill()
                    tried.kill()
        finally:
            made.remove()


class Cgroup:
    """The cgroup of one sandbox: sets its limits, counts the processes killed for lack of memory, and removes it."""

    def __init__(self, path: str, disk_mb: int, lock: int) -> None:
        """Takes over a cgroup. `lock` is a locked descriptor of its directory, held while the cgroup is in use."""
        self.path = path
        self.members = f"{path}/cgroup.procs"
        self._disk_mb = disk_mb
        self._lock = lock
        self._in_force: tuple[int, int] | None = None

    def limit(self, limits: Limits, message_bytes: int = 0) -> None:
        """Sets the limits of the next call, whose request to the agent has `message_bytes`.

        The cgroup's memory limit also covers files on the disk and the output that the agent holds.
        """
        agent = _KEEPERS_MB * _MIB + _COPIES * message_bytes + 2 * limits.output_kb * 1024
        wanted = (limits.memory_mb + self._disk_mb) * _MIB + agent, limits.processes + _KEEPERS
        if wanted != self._in_force:
            _write(f"{self.path}/memory.max", str(wanted[0]))
            _write(f"{self.path}/pids.max", str(wanted[1]))
            self._in_force = wanted

    def kills(self) -> int:
        """Returns the number of processes in the cgroup that the kernel has killed for lack of memory."""
        counts = dict(line.split() for line in _read(f"{self.path}/memory.events").splitlines())
        return int(counts["oom_kill"])

    def kill(self) -> None:
        """Kills all processes of the cgroup at once. Does nothing before Linux 5.14, where the end of the pid namespace has to kill
        them."""
        with contextlib.suppress(OSError):
            if os.path.exists(f"{self.path}/cgroup.kill"):
                _write(f"{self.path}/cgroup.kill", "1")

    def remove(self) -> None:
        """Removes the cgroup once it has no processes. If that fails, the next run removes it. May be called twice."""
        if self._lock < 0:
            return
        for _ in range(50):
            try:
                os.rmdir(self.path)
                break
            except OSError as error:
                if error.errno != errno.EBUSY:
                    break
                time.sleep(0.002)  # the last process has ended, but is still listed
        os.close(self._lock)
        self._lock = -1


def _own_directory() -> str:
    """Returns the directory of this process's cgroup, or its parent if the cgroup is the child `nmoe` of an earlier claim. Raises
    NotDelegatedError if it is not delegated."""
    own = next((line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")), None)
    mounts = [line.split() for line in _read("/proc/self/mountinfo").splitlines()]
    mounted = next(((row[3], row[4]) for row in mounts if row[row.index("-") + 1] == "cgroup2"), None)
    if own is None or mounted is None:
        raise NotDelegatedError("cgroup v2 is not mounted")
    root, directory = mounted
    beneath = own.removeprefix(root.rstrip("/"))
    path = os.path.normpath(f"{directory}/{beneath}")
    if os.path.basename(path) == _LEAF:
        path, beneath = os.path.dirname(path), os.path.dirname(beneath)
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        if not os.access(f"{path}/{name}", os.W_OK):
            raise NotDelegatedError(f"{path}/{name} is not writable")
    # Root may write everywhere, so only a delegation mark, or being the hierarchy's root, makes a cgroup its own.
    if os.getuid() == 0 and beneath.strip("/") and not _is_marked(path):
        raise NotDelegatedError(f"{path} is not marked as delegated")
    return path


def _is_marked(path: str) -> bool:
    """Returns whether systemd's extended attributes mark the directory as delegated."""
    for name in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(path, name) == b"1":
                return True
    return False


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Locks the directory within the `with` block, so that no other process creates, removes or enables cgroups in it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    # Unbuffered, so that the kernel's error belongs to this one write.
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())
