"""The agent, the first process of a sandbox: forks a child for every call, enforces the limits, and kills everything that the call
started.

It is pid 1 of its pid namespace. Signals from inside do not reach it, and it cannot be traced or read (PR_SET_DUMPABLE, seccomp).
It ends when the host's end of the control socket closes, and the kernel then kills everything else in the namespace. It holds no
secrets from the code that it runs: neither tests nor the host's environment.
"""

from __future__ import annotations

# The modules without the underscore import enum, re and others, which adds 15 ms to a cold start.
import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import fcntl
import gc
import math
import os
import resource
import select
import struct
import time

from nmoe.sandbox.inside import child, files, kernel, landlock, watch
from nmoe.sandbox.inside.protocol import SIZES, answer, parse_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_WATCH_EVERY_S = 0.02
# While processes come and go between two looks: what such a process did since it was last seen may count nowhere.
_WATCH_CHURN_EVERY_S = 0.003
_IDLE_S = 0.005
_MIB = 1 << 20
# Address space beyond `memory_mb`, which limits resident memory, for libraries and thread stacks.
_ADDRESS_SPACE_SLACK_MB = 1024
_OPEN_FILES = 256
_FIRST_TO_GO = b"1000"
# A disk with less free space counts as full: a program that filled it may have had its last pages taken back.
_FULL_BYTES = 64 * 1024

_LIKELY = ("collections", "functools", "itertools", "json", "linecache", "math", "random", "re", "traceback")
_STATED = frozenset({"out_of_memory", "disk_full", "sandbox_denied", "command_not_found", "tool_error", "output_limit"})


class Agent:
    def __init__(
        self, control: socket.socket, workspace: str, readable: list[str], held: int, score: int, fenced: bool
    ) -> None:
        """Makes the agent of a sandbox with the directory `workspace`; `control` is the socket to the host.

        `readable` are the paths outside the workspace that calls may read. `held` is the number of processes of the
        user namespace that belong to no call. `score` is a descriptor of this process's own oom_score_adj. `fenced`
        says that Landlock already restricts this process; otherwise it restricts the calls, if the kernel has it.
        """
        self._control = control
        self._workspace = workspace
        self._cwd = workspace
        self._readable = readable
        self._held = held
        self._score, self._own_score = score, os.pread(score, 16, 0)
        self._rules: list[tuple[str, int]] | None = None  # the access rules for the workspace
        # Made once: its paths stay what they are.
        self._usual = None if fenced or not landlock.version() else landlock.ruleset(default_landlock_rules(readable))

    def serve(self) -> NoReturn:
        """Answers the host's requests until the host is gone."""
        # Python has a handler for SIGINT alone; any handler would let the signal reach pid 1.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        os.environ.pop("PWD", None)  # set by bubblewrap, and wrong after the first change of directory
        self._send(answer("ok", None, (0.0, 0.0, 0.0), b"", b""))
        if not select.select([self._control], [], [], _IDLE_S)[0]:
            # Before the first call: preload the modules that most code imports.
            for name in _LIKELY:
                __import__(name)
        gc.collect()
        gc.freeze()
        while True:
            header, blobs, descriptors = self._request()
            channel = descriptors[0] if descriptors else None
            match header["op"]:
                case "run":
                    act = child.command(header["argv"])
                case "bash":
                    act = child.command(
                        ["bash", "-c", f"trap 'pwd -P >&{child.STATUS}' EXIT\n{header['script']}"], True
                    )
                case "python":
                    act = child.python(blobs[0].decode())
                case "read":
                    act = files.read(self._workspace, header["path"])
                case "read_lines":
                    act = files.read_lines(self._workspace, header["path"], header["first"], header["count"])
                case "edit":
                    act = files.edit(self._workspace, header["path"], *blobs)
                case "write":
                    act = files.write(self._workspace, header["path"], blobs[0])
                case "put":
                    act = files.put(self._workspace, header["entries"], blobs)
                case "access":
                    self._rules = self._access_rules(header["read"], header["write"])
                    act = child.nothing
                case unknown:
                    raise ValueError(f"no request {unknown!r}")
            if header.get("cwd"):
                self._cwd = os.path.normpath(os.path.join(self._cwd, header["cwd"]))
            stdin = blobs[-1] if header["op"] in ("run", "python") else b""
            self._call(act, header["limits"], stdin, channel)

    def _access_rules(self, read: list[str] | None, write: list[str] | None) -> list[tuple[str, int]]:
        rules = system_rules(self._readable)
        for paths, rights in ((read, landlock.READ), (write, landlock.WRITE)):
            for path in ["."] if paths is None else paths:
                whole = os.path.join(self._workspace, path)
                if not os.path.lexists(whole):
                    os.makedirs(whole)
                rules.append((whole, rights))
        return rules

    def _call(self, act: Callable[[], None], limits: dict[str, float], stdin: bytes, channel: int | None) -> None:
        out, err, status = os.pipe(), os.pipe(), os.pipe()
        feed = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY), -1)
        began = time.monotonic()
        # Inherited by the child, so that the out-of-memory killer takes a process of the call, not the agent.
        os.pwrite(self._score, _FIRST_TO_GO, 0)
        pid = os.fork()
        if pid == 0:
            try:
                self._enter(limits, feed[0], out[1], err[1], status[1], channel)
                act()
            except BaseException as error:
                child.end_by(error)
            os._exit(0)
        os.pwrite(self._score, self._own_score, 0)
        for descriptor in (out[1], err[1], status[1], feed[0], *([] if channel is None else [channel])):
            os.close(descriptor)
        watched = _Call(self._control, pid, out[0], err[0], feed[1], stdin, limits, began)
        failure, exit_code = watched.watch()
        stated = _drain(status[0])
        os.close(status[0])
        failure = failure or self._failure(exit_code, stated)
        times = time.monotonic() - began, watched.cpu_s, watched.starvation.seconds
        self._send(answer(failure, exit_code, times, watched.out, watched.err))

    def _enter(
        self, limits: dict[str, float], stdin: int, stdout: int, stderr: int, status: int, channel: int | None
    ) -> None:
        """Sets up the child process of a call: its descriptors (closing all others), limits, access rules and directory."""

        if self._usual is not None and self._rules is None:
            landlock.restrict(self._usual)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        # Two steps, because a descriptor to move may have the number that another needs.
        status = _above(status, child.STATUS)
        if channel is not None:
            os.dup2(_above(channel, child.STATUS), child.CHANNEL)
        else:
            os.closerange(child.CHANNEL, child.STATUS)
        os.dup2(status, child.STATUS, inheritable=False)
        os.closerange(child.STATUS + 1, 1024)
        memory = int(limits["memory_mb"] + _ADDRESS_SPACE_SLACK_MB) * _MIB
        # The watch ends a call first. It counts in ticks, and the kernel kills at the limit, in whole seconds, without a word.
        cpu = math.ceil(limits["cpu_s"]) + 1
        for kind, limit in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_FSIZE, int(limits["file_mb"] * _MIB)),
            (resource.RLIMIT_NPROC, int(limits["processes"]) + self._held),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            # 1, not 0: the kernel ignores a limit of 0 if the host pipes core dumps to a handler (core(5)).
            (resource.RLIMIT_CORE, 1),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_SIGPENDING, 1024),
        ):
            hard = resource.getrlimit(kind)[1]
            most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            # A second later, so that the process ends by SIGXCPU, which names the limit, not by SIGKILL.
            later = limit + 1 if kind == resource.RLIMIT_CPU else limit
            resource.setrlimit(kind, (most, later if hard == resource.RLIM_INFINITY else min(later, hard)))
        try:
            os.chdir(self._cwd)
        except OSError:
            os.chdir(self._workspace)
        if self._rules is not None:
            landlock.restrict(landlock.ruleset(self._rules))
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)

    def _failure(self, exit_code: int | None, stated: bytes) -> str:
        """Returns the failure name of a call that no limit ended, from the exit code and the child's own report.

        A child that lies only misnames its own end.
        """
        failure = "ok" if exit_code == 0 else "nonzero_exit"
        for line in stated.decode(errors="replace").splitlines():
            if line.startswith("/") and os.path.isdir(line):
                self._cwd = line
            elif line in _STATED:
                failure = line
        if failure == "nonzero_exit" and exit_code is not None:
            disk = os.statvfs(self._workspace)
            # A shell whose command a signal ended exits with 128 plus its number.
            number = -exit_code if exit_code < 0 else exit_code - 128
            if number == signal.SIGXFSZ or disk.f_bavail * disk.f_frsize < _FULL_BYTES or not disk.f_favail:
                failure = "disk_full"
            elif number == signal.SIGSYS:
                failure = "sandbox_denied"
            elif number == signal.SIGXCPU:
                failure = "timeout"
        return failure

    def _request(self) -> tuple[dict[str, Any], list[bytes], list[int]]:
        sizes, ancillary, _, _ = self._control.recvmsg(SIZES.size, socket.CMSG_SPACE(4), kernel.MSG_CMSG_CLOEXEC)
        if not sizes:
            os._exit(0)
        header, body = SIZES.unpack(sizes + self._receive(SIZES.size - len(sizes)))
        return *parse_request(self._receive(header), self._receive(body)), [
            struct.unpack("i", one[2])[0] for one in ancillary
        ]

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._control.recv(min(size - len(data), _MIB))
            if not part:
                os._exit(0)
            data += part
        return bytes(data)

    def _send(self, message: bytes) -> None:
        try:
            self._control.sendall(message)
        except OSError:
            os._exit(0)


class _Call:
    """A running call: one child and everything that it starts, until they are dead."""

    def __init__(
        self,
        control: socket.socket,
        pid: int,
        out: int,
        err: int,
        feed: int,
        stdin: bytes,
        limits: dict[str, float],
        began: float,
    ) -> None:
        self.out, self.err = bytearray(), bytearray()
        self._control, self._pid, self._feed, self._stdin = control, pid, feed, memoryview(stdin)
        self._streams = {out: self.out, err: self.err}
        self._limits = limits
        self._began = self._looked = began
        self._deadline = began + limits["wall_s"]
        self._room = int(limits["output_kb"] * 1024)
        self._usage = watch.Usage()
        self._reaped: dict[str, float] = {}  # pid: seconds of CPU time, since the last look
        self.starvation = watch.Starvation()
        self._status: int | None = None

    def watch(self) -> tuple[str | None, int | None]:
        """Waits for the end of the call and enforces its limits. Returns the name of the limit that was exceeded, None if none was,
        and the exit code, None if a limit stopped the child."""
        poll = select.poll()
        poll.register(self._control, 0)
        pidfd = os.pidfd_open(self._pid)
        poll.register(pidfd, select.POLLIN)
        for stream in self._streams:
            os.set_blocking(stream, False)
            poll.register(stream, select.POLLIN)
        if self._feed >= 0:
            os.set_blocking(self._feed, False)
            poll.register(self._feed, select.POLLOUT)
        failure = None
        next_watch = time.monotonic() + _WATCH_EVERY_S
        while failure is None:
            now = time.monotonic()
            if now >= min(next_watch, self._deadline):
                failure = self._passed()
                if failure:
                    break
                now = time.monotonic()
                next_watch = now + (_WATCH_CHURN_EVERY_S if self._usage.hidden else _WATCH_EVERY_S)
            ended = False
            for descriptor, events in poll.poll(max(0.0, min(self._deadline, next_watch) - now) * 1000):
                if descriptor == self._control.fileno():
                    os._exit(0)  # the host is gone; everything else ends with pid 1
                elif descriptor == pidfd:
                    ended = True
                elif descriptor == self._feed:
                    self._write(poll, events)
                elif not self._read(descriptor):
                    poll.unregister(descriptor)
            if self._room < 0:
                failure = "output_limit"
            elif ended:
                break
        self._kill()
        self._usage.end(self._reaped)
        os.close(pidfd)
        for stream in self._streams:
            while self._room >= 0 and self._read(stream):
                pass
            os.close(stream)
        if self._feed >= 0:
            os.close(self._feed)
        if self._room < 0:
            failure = failure or "output_limit"
        code = None if failure or self._status is None else os.waitstatus_to_exitcode(self._status)
        return failure, code

    @property
    def cpu_s(self) -> float:
        return self._usage.seconds

    def _passed(self) -> str | None:
        while self._reap():
            pass
        resident = self._usage.look(self._reaped)
        self._reaped.clear()
        if self._usage.seconds > self._limits["cpu_s"]:
            return "timeout"
        allowed = self._limits["memory_mb"] * _MIB - watch.socket_memory()
        if resident > allowed and watch.shared_memory_once() > allowed:
            return "out_of_memory"
        if self._limits["starved_s"]:
            now = time.monotonic()
            self.starvation.look(now - self._looked, hidden=self._usage.hidden)
            self._looked = now
            more_s = min(self.starvation.seconds, self._limits["starved_s"])
            self._deadline = self._began + self._limits["wall_s"] + more_s
        # A child that ended in time is not late, even if this process looks late.
        return "timeout" if self._status is None and time.monotonic() >= self._deadline else None

    def _read(self, stream: int) -> bool:
        """Reads the available output of a stream, up to the limit; returns False if there is no more for now."""
        try:
            data = os.read(stream, 65536)
        except BlockingIOError:
            return False
        self._streams[stream].extend(data[: max(self._room, 0)])
        self._room -= len(data)
        return bool(data)

    def _write(self, poll: select.poll, events: int) -> None:
        try:
            self._stdin = self._stdin[os.write(self._feed, self._stdin[:65536]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            poll.unregister(self._feed)
            os.close(self._feed)
            self._feed = -1

    def _reap(self, options: int = os.WNOHANG) -> bool:
        """Waits for one child or orphan that has ended; returns False if there is none."""
        try:
            pid, status, used = os.wait4(-1, options)
        except ChildProcessError:
            return False
        if pid == self._pid:
            self._status = status
        if pid:
            self._reaped[str(pid)] = used.ru_utime + used.ru_stime
        return bool(pid)

    def _kill(self) -> None:
        """Kills everything in the namespace except this process until nothing is left. Repeated, to catch a fork in progress."""
        while True:
            # The child may have ended by itself; this signal must not replace its own status.
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                if not self._reap(0):
                    return
                continue
            if not self._reap(0):
                return


def default_landlock_rules(readable: list[str]) -> list[tuple[str, int]]:
    """Returns the Landlock rules for calls that may access the whole workspace."""
    return [*system_rules(readable), ("/", landlock.LIST), ("/workspace", landlock.WRITE)]


def system_rules(readable: list[str]) -> list[tuple[str, int]]:
    """Returns the Landlock rules for the paths outside the workspace that every call may access."""
    rules = [(path, landlock.READ) for path in (*readable, "/proc", "/dev")]
    rules += [(path, landlock.WRITE) for path in ("/tmp", "/dev/shm")]
    return rules + [(f"/dev/{name}", landlock.DEVICE) for name in ("null", "zero", "full", "random", "urandom")]


def _above(descriptor: int, least: int) -> int:
    """Returns a copy of a descriptor whose number is greater than `least`."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least + 1)


def _drain(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 8192)
    except BlockingIOError:
        return b""
