"""Starts processes, such as engine servers and ranks that train: on this machine, or wherever another launcher does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

_KEEPER = Path(__file__).with_name("keeper.py")
# Seconds that a process has to end when it is asked to; the keeper kills it after ten.
_END_S = 15.0
# What the keeper reads: end the processes as a terminal would, or kill them.
_ASK, _KILL = b"t", b"k"


PORT = "{port}"


@dataclass(frozen=True)
class Command:
    """A command line, in which `{port}` stands for a free port and `{host}` for the address to listen on, and the variables that
    are added to the environment. A variable may be the port, too."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)

    def at(self, host: str, port: str) -> Command:
        """Returns the command for an address."""
        argv = [part.replace(PORT, port).replace("{host}", host) for part in self.argv]
        return Command(argv, {name: port if value == PORT else value for name, value in self.env.items()})


class Process(Protocol):
    """A process that a launcher has started. `address` is `host:port`. Its output goes to the file `log`, from the byte `began`."""

    address: str
    log: Path
    began: int

    def code(self) -> int | None:
        """Returns the exit code, 128 + N after the signal N; None while the process runs."""
        ...

    def ask(self) -> None:
        """Asks the process to end, by SIGTERM."""
        ...

    def end(self) -> None:
        """Asks the process to end, and kills it and all that it started if it has not after some seconds."""
        ...

    def kill(self) -> None:
        """Kills the process and all that it started at once."""
        ...


class Launcher(Protocol):
    """Starts processes, each of which ends with the process that started it, however that ended."""

    def start(self, role: str, command: Command, gpus: float, at: str = "") -> Process:
        """Starts a command and returns at once. `role` is its name among the launcher's processes, and of its log. `gpus` are
        those that it needs, a part of one included. `at` is the address of an earlier process, to be started there again. Raises
        InfrastructureError where nothing can be started."""
        ...


class LocalProcess:
    """A process of this machine, which a keeper watches."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], address: str, log: Path) -> None:
        self.address, self.log = address, log
        log.parent.mkdir(parents=True, exist_ok=True)
        # A program may write its arguments, and so a key, into its log.
        with open(log, "ab", opener=partial(os.open, mode=0o600)) as file:
            self.began = os.fstat(file.fileno()).st_size
            self._keeper = subprocess.Popen(
                [sys.executable, "-S", "-E", str(_KEEPER), *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | env,
            )

    @property
    def pid(self) -> int:
        """The id of the keeper, whose child the process is."""
        return self._keeper.pid

    def code(self) -> int | None:
        return self._keeper.poll()

    def ask(self) -> None:
        self._write(_ASK)

    def end(self) -> None:
        assert self._keeper.stdin is not None
        with suppress(OSError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def kill(self) -> None:
        self._write(_KILL)
        self.end()

    def _write(self, what: bytes) -> None:
        assert self._keeper.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            self._keeper.stdin.write(what)
            self._keeper.stdin.flush()


class LocalLauncher:
    """Starts processes of this machine. Their GPUs are those that the command's environment names."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def start(self, role: str, command: Command, gpus: float, at: str = "") -> LocalProcess:
        host, _, port = (at or f"127.0.0.1:{free_port()}").rpartition(":")
        placed = command.at(host, port)
        return LocalProcess(placed.argv, placed.env, f"{host}:{port}", self._logs / f"{role}.log")


def free_port() -> int:
    """Returns a port that the kernel chose. Another program can take it before the process does, which then ends with an error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
