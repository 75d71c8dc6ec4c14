"""Commands in processes of their own that begin with torch imported, which costs 2 CPU seconds each time: a process that has
imported it forks them."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import numpy as np

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["nmoe.cli", "nmoe.recipes.pretrain", "nmoe.rl.launch"])


@dataclass(frozen=True)
class Result:
    """How a command ended and what it said."""

    code: int | str | None
    out: str
    err: str


class Forked:
    """`main`, by default the `nmoe` command, with these arguments, in a directory and with additions to the environment;
    `before` is called there first. Its output is added to the file `log`, if there is one."""

    def __init__(
        self,
        directory: Path,
        *arguments: str | Path,
        stdin: str = "",
        before: Callable[[], object] | None = None,
        main: str = "nmoe.cli:main",
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._streams = tempfile.TemporaryDirectory()
        Path(self._streams.name, "0").write_text(stdin)
        if log is not None:
            for name in "12":
                Path(self._streams.name, name).symlink_to(log)
        call = (
            self._streams.name,
            str(directory),
            {**os.environ, **(environment or {})},
            main,
            list(map(str, arguments)),
            before,
        )
        self._process = _SERVER.Process(target=_call, args=call, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code if it has ended, negative after a signal."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Does nothing where it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code; None if it has not ended in these seconds."""
        self._process.join(seconds)
        return self.poll()

    def line(self) -> str:
        """The first line that it prints."""
        while "\n" not in (said := self._said("1")):
            assert self.poll() is None, self._said("2")
            time.sleep(0.01)
        return said.partition("\n")[0]

    def ended(self) -> Result:
        """Waits for its end."""
        self.wait()
        result = Result(self.poll(), self._said("1"), self._said("2"))
        self._streams.cleanup()
        return result

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()
        self._streams.cleanup()

    def _said(self, number: str) -> str:
        path = Path(self._streams.name, number)
        return path.read_text() if path.exists() else ""


def ended_cpu_s() -> float:
    """Returns the CPU seconds of the forked processes that have ended. They are no children of this one."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None:
        return 0.0
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def script() -> None:
    """Runs the script that is the first argument with the others."""
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _call(
    streams: str,
    directory: str,
    environment: dict[str, str],
    main: str,
    arguments: list[str],
    before: Callable[[], object] | None,
) -> None:
    for number, flags in enumerate((os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_APPEND] * 2)):
        os.dup2(os.open(f"{streams}/{number}", flags), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  multiprocessing has closed it
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["nmoe", *arguments]
    np.random.seed()  # a program begins with numbers of its own; `random` draws others after a fork
    try:
        if before is not None:
            before()
        module, _, function = main.partition(":")
        getattr(importlib.import_module(module), function)()
    finally:
        threading._shutdown()  # multiprocessing leaves out what a program does at its end
        atexit._run_exitfuncs()
