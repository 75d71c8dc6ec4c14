"""Runs one side of a benchmark in a separate process, as its users run it: no side's allocator, threads or settings reach another.

Sides take turns: a side works only between a question and its answer.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

_PATIENCE_S = 60.0  # for a side that was told to end


class Side:
    """Runs `serve(connection, *arguments)`, a function of a module that lies beside this one, in a fresh process: under the
    interpreter `python`, which may be that of another environment, with `environment` added to this process's. `serve` answers
    every message that it receives, until None.

    What a side prints goes to stderr: stdout is for the measurements. A context manager, so that no process outlives the benchmark.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        *arguments: Any,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [python, __file__, str(theirs.fileno()), serve.__module__, serve.__name__],
                pass_fds=[theirs.fileno()],
                stdout=sys.stderr,
                env={**os.environ, **(environment or {})},
            )
        self.connection.send(arguments)

    def ask(self, message: Any) -> Any:
        """The answer to a message. Raises EOFError where the process has died; its traceback is on stderr."""
        self.connection.send(message)
        return self.connection.recv()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            # A side may end by itself after its last answer, as a trainer told to do so many steps.
            with contextlib.suppress(BrokenPipeError):
                self.connection.send(None)
            try:
                self.process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                print(f"benchmark: a side did not end within {_PATIENCE_S:.0f} s and is killed", file=sys.stderr)
        self.process.kill()
        self.process.wait()


def answer(connection: Connection, reply: Callable[[Any], Any]) -> None:
    """Answers every message by `reply(message)`, until None."""
    while (message := connection.recv()) is not None:
        connection.send(reply(message))


if __name__ == "__main__":
    file_descriptor, module, function = sys.argv[1:]
    connection = Connection(int(file_descriptor))
    getattr(import_module(module), function)(connection, *connection.recv())
