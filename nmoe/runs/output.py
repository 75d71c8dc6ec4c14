"""Copies the output of a command to log.txt: printed lines, warnings, and the traceback that ends the command."""

import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from nmoe.errors import StorageError, UserError

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_command = False


@contextmanager
def of_a_command() -> Iterator[None]:
    """Marks the `with` block as a command of nmoe, whose whole output belongs in the log of its runs. Without it, in a program or a
    notebook, a run logs only its own lines."""
    global _command
    _command, before = True, _command
    try:
        yield
    finally:
        _command = before


@contextmanager
def logged(log: Path) -> Iterator[None]:
    """Copies each line that a command prints to stdout or stderr in the `with` block to the file `log`, at once.

    In a program or notebook (see `of_a_command`) only an error that ends the block is logged. Output of other processes
    and of C libraries is not logged.
    """
    try:
        if _command:
            with _teed(log):
                yield
        else:
            yield
    except UserError as error:
        _append(log, f"error: {error}\n")
        raise
    except Exception:
        _append(log, traceback.format_exc())
        raise


@contextmanager
def _teed(log: Path) -> Iterator[None]:
    streams = sys.stdout, sys.stderr
    tees = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
    sys.stdout, sys.stderr = tees
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for tee in tees:
            tee.finish()


class _Tee:
    """A stream that also appends whole lines to a log: without colours, and only the last state of a line that overwrites
    itself."""

    def __init__(self, stream: TextIO, log: Path) -> None:
        self._stream, self._log = stream, log
        self._begun = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            self._keep(lines)
        if lines:
            self._stream.flush()
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Logs a last line that has no line break."""
        with self._lock:
            self._keep([self._begun] if self._begun else [])
            self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _keep(self, lines: list[str]) -> None:
        if lines:
            shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
            _append(self._log, "".join(_CONTROL.sub("", line) + "\n" for line in shown))


def _append(log: Path, text: str) -> None:
    from nmoe.runs.storage import append_whole  # here, so that `nmoe --help` does not wait for it

    # A full disk ends the run where its records are written; a line that is only printed does not.
    with suppress(StorageError):
        append_whole(log, text.encode(errors="backslashreplace"))
