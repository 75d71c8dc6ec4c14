"""Processes that read and tokenise documents, while the run trains.

    python -m nmoe.data.tokenising DESCRIPTOR      one of them, which DocumentWorkers starts

A worker gets one span at a time and answers with its documents. So a lost worker is named with the span that it was reading, and
only the spans that were asked for are read ahead.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, cast

from nmoe.cores import usable_cores
from nmoe.data.documents import DocumentReader, Found
from nmoe.data.spans import Span
from nmoe.errors import InfrastructureError, UserError

_PACKAGE_ROOT = str(Path(__file__).parents[2])
_ENDING_S = 5.0
_MOST_WORKERS = 8

Task = Literal["read", "check"]


class Pending(Protocol):
    """The documents of a span that may still be read; `result()` waits for them."""

    def result(self) -> Found: ...


class DocumentWorkers:
    """Reads spans in `workers` processes or, with 0, in this one, when their result is asked for. With None there are processes
    only from `need` on: half as many as cores, of which each of `sharing` processes has its part. Used in a `with` block, at whose
    end the processes end."""

    def __init__(self, reader: DocumentReader, workers: int | None, sharing: int = 1) -> None:
        self.reader, self._sharing = reader, sharing
        self._waits = workers is None
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: list[_Worker] = []
        self._threads: ThreadPoolExecutor | None = None
        if workers:
            self._start(workers)

    def need(self) -> None:
        """Starts processes for a large source, if their number was left open."""
        if self._waits:
            self._waits = False
            self._start(min(_MOST_WORKERS, max(1, usable_cores() // (2 * self._sharing))))

    def _start(self, workers: int) -> None:
        self._all = [_Worker(self.reader) for _ in range(workers)]
        for worker in self._all:
            self._free.put(worker)
        # One thread per process, which waits for its answers.
        self._threads = ThreadPoolExecutor(workers, "nmoe-documents")

    def pids(self) -> list[int]:
        """Returns the process ids of the workers."""
        return [worker.process.pid for worker in self._all]

    def __enter__(self) -> DocumentWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._all:
            worker.process.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.end()

    def submit(self, task: Task, span: Span) -> Pending:
        """Begins to read or check a span (`DocumentReader`). The result raises UserError as these do, and InfrastructureError if
        the worker is lost."""
        if self._threads is None:
            return _Later(getattr(self.reader, task), span)
        return self._threads.submit(self._run, task, span)

    def _run(self, task: Task, span: Span) -> Found:
        worker = self._free.get()
        try:
            return worker.call(task, span)
        finally:
            self._free.put(worker)


class _Later:
    """A span that this process reads when its documents are asked for."""

    def __init__(self, read: Callable[[Span], Found], span: Span) -> None:
        self._read, self._span = read, span

    def result(self) -> Found:
        return self._read(self._span)


class _Worker:
    """A process and the connection to it."""

    def __init__(self, reader: DocumentReader) -> None:
        path = os.pathsep.join([_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._connection, theirs = Pipe()
        descriptor = theirs.fileno()
        command = [sys.executable, "-m", "nmoe.data.tokenising", str(descriptor)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], env=environment)
        theirs.close()
        with suppress(OSError):  # a lost worker is noticed where its answer is missing
            self._connection.send(reader)

    def call(self, task: Task, span: Span) -> Found:
        try:
            self._connection.send((task, span))
            answer = self._connection.recv()
        except (OSError, EOFError):
            code = self.process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise InfrastructureError(
                f"{span}: the process {self.process.pid} that tokenised it was lost ({how}); if the memory was full, lower "
                "data.workers, and resume the run"
            ) from None
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"{span}: a tokenising process raised\n{answer}")
        return cast(Found, answer)

    def end(self) -> None:
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING_S)


def serve(connection: Connection) -> None:
    """Reads spans until the parent closes the connection."""
    for one in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the parent, which gets them too, ends its workers when it has saved its state
        signal.signal(one, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        reader: DocumentReader = connection.recv()
        while True:
            task, span = connection.recv()
            try:
                answer: Found | UserError | str = getattr(reader, task)(span)
            except UserError as error:
                answer = error
            except Exception:
                answer = traceback.format_exc()
            connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
