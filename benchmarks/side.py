"""One side of a benchmark in a process of its own, as its users run it: no side's allocator, threads or settings reach another.

Sides take turns: a side works only between a question and its answer.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any


class Side:
    """Runs `serve(connection, *arguments)` in a fresh process. `serve` answers every message that it receives, until None.

    A context manager, so that no process outlives the benchmark.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, message: Any) -> Any:
        """The answer to a message. Raises EOFError where the process has died; its traceback is on stderr."""
        self.connection.send(message)
        return self.connection.recv()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.is_alive() and kind is None:
            self.connection.send(None)
            self.process.join(timeout=60)
        self.process.terminate()
        self.process.join()


def answer(connection: Connection, reply: Callable[[Any], Any]) -> None:
    """Answers every message by `reply(message)`, until None."""
    while (message := connection.recv()) is not None:
        connection.send(reply(message))
