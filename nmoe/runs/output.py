"""Copy the output of a command to log.txt: lines, warnings, and the traceback that ends it."""

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
    """Marks this process as a command of nmoe in the block, so that all output belongs to its runs. A program or a notebook prints
    for itself, and a run there logs its own lines alone."""
    global _command
    _command, before = True, _command
    try:
        yield
    finally:
        _command = before


@contextmanager
def logged(log: Path) -> Iterator[None]:
    """In the block of a command, each line printed to stdout or stderr is also appended to `log` at once. The error that ends the
    block is appended wherever it runs. Output of other processes and of libraries in C is not."""
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
    """A stream that appends whole lines to a log, too: without colours, and of a line that overwrites itself its last state."""

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
        """Logs a last line without an end."""
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
