"""A pool of grading workers: processes that may hang, crash or be killed without harm to the caller.

Code that can hang on a hostile answer (symbolic mathematics, other packages' verifiers) runs in `nmoe.grading.workers.worker`.
One thread per worker sends it several calls at a time and waits for the replies, so neither an event loop nor the caller's
thread blocks. Time in the queue does not count towards the deadline.

  - "deadline": the call used up its CPU time, counted from its start in the worker. The answer caused it.
  - "exhausted": the call crashed two workers, or ran out of memory or stack. The answer caused it.
  - "lost": the worker was lost for another reason (killed from outside, or it could not start), and so was the second worker
  that
    repeated the call. There is no verdict.

Lost workers are replaced. Workers end with their parent, even if it is killed: their input ends, and the kernel kills them
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nmoe.cores import usable_cores

DEADLINE_S = 3.0
MEMORY_MB = 2048

_PACKAGE_ROOT = str(Path(__file__).parents[3])
# Signals that a crashing process causes itself.
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_BATCH = 16
_START_S = 120.0


@dataclass(frozen=True)
class Reply:
    """The outcome of a call in a worker process. `value` is the function's result, or a reason in words for other statuses."""

    status: Literal["value", "deadline", "exhausted", "lost"]
    value: Any


class WorkerError(Exception):
    """The called function raised an exception in the worker, which is a bug in the function. The message has its traceback."""


@dataclass
class _Call:
    arguments: list[Any]
    future: Future[Reply] = field(default_factory=Future)
    losses: list[int | None] = field(default_factory=list)  # signals that ended its processes; None: unknown


class WorkerPool:
    """Calls `function` ("module:name") in `workers` processes, which start with the first call.

    `deadline_s` is the CPU time of one call; `memory_mb` limits a worker's address space.
    """

    def __init__(
        self, function: str, workers: int | None = None, *, deadline_s: float = DEADLINE_S, memory_mb: int = MEMORY_MB
    ) -> None:
        self._command = [sys.executable, "-m", "nmoe.grading.workers.worker", function, str(deadline_s), str(memory_mb)]
        self._size = workers or max(1, min(4, usable_cores() - 1))
        # A worker without CPU time never reaches its deadline. After this long without a reply it counts as lost.
        self._silence_s = 20 * deadline_s + 60
        self._queue: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, _Worker] = {}
        self._closed = False
        atexit.register(self.close)

    def submit(self, *arguments: Any) -> Future[Reply]:
        """Queues a call with arguments that JSON can express and returns its future reply. The future raises WorkerError if the
        function raised. Raises RuntimeError if the pool is closed.
        """
        call = _Call(list(arguments))
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._queue.append(call)
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._serve, args=(index,), name=f"nmoe-grading-{index}", daemon=True)
                    for index in range(self._size)
                ]
                for thread in self._threads:
                    thread.start()
            self._changed.notify()
        return call.future

    async def call(self, *arguments: Any) -> Reply:
        """Submits a call and awaits its reply."""
        return await asyncio.wrap_future(self.submit(*arguments))

    def pids(self) -> list[int]:
        """Returns the process ids of the live workers."""
        return [worker.process.pid for worker in list(self._processes.values())]

    def close(self) -> None:
        """Ends the workers and cancels waiting and running calls. Safe to call twice."""
        with self._changed:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for call in waiting:
            call.future.cancel()
        for worker in list(self._processes.values()):
            worker.process.kill()
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.close)

    def _serve(self, index: int) -> None:
        try:
            while calls := self._take():
                self._run(index, calls)
        finally:
            if index in self._processes:
                self._processes.pop(index).end()

    def _take(self) -> list[_Call]:
        """Waits for queued calls and returns this thread's share, at most a batch; empty once the pool is closed."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            share = -(-len(self._queue) // self._size)
            return [self._queue.popleft() for _ in range(min(share, _BATCH))]

    def _run(self, index: int, calls: list[_Call]) -> None:
        """Runs calls in this thread's worker; calls left unanswered when the worker is lost return to the queue."""
        left = deque(calls)
        try:
            worker = self._processes.get(index)
            if worker is None:
                worker = self._processes[index] = _Worker(self._command)
                if self._closed:  # closed in the meantime, so close() did not kill this worker
                    raise _LostError
                worker.read(_START_S)
            worker.send([call.arguments for call in calls])
            while left:
                status, value = worker.read(self._silence_s)
                if status == "died":
                    if not self._lose(left[0], value):
                        left.popleft()
                    break
                call = left.popleft()
                _finish(
                    call,
                    WorkerError(f"a grading worker raised\n{value}") if status == "raised" else Reply(status, value),
                )
                if status == "exhausted":
                    break
        except (_LostError, OSError):  # OSError: no process could be started
            if index in self._processes:
                self._processes.pop(index).end()
            if not self._closed and not self._lose(left[0], None):
                left.popleft()
        with self._changed:
            if self._closed:
                for call in left:
                    call.future.cancel()
            else:
                self._queue.extendleft(reversed(left))
                self._changed.notify_all()

    def _lose(self, call: _Call, by: int | None) -> bool:
        """Records that a worker process was lost on a call. Returns True if the call should be repeated; otherwise finishes it."""
        if by == signal.SIGPROF:
            _finish(call, Reply("deadline", "took longer than the deadline"))
            return False
        call.losses.append(by)
        if len(call.losses) < 2:
            return True
        if all(loss in _CRASHES for loss in call.losses):
            _finish(call, Reply("exhausted", "crashed two workers"))
        else:
            signals = " and ".join("none" if loss is None else signal.Signals(loss).name for loss in call.losses)
            _finish(call, Reply("lost", f"two workers were lost on it, by signals {signals}"))
        return False


def _finish(call: _Call, outcome: Reply | WorkerError) -> None:
    if not call.future.set_running_or_notify_cancel():
        return  # the caller cancelled
    if isinstance(outcome, Reply):
        call.future.set_result(outcome)
    else:
        call.future.set_exception(outcome)


class _LostError(Exception):
    """The worker process ended or did not reply in time."""


class _Worker:
    """One worker process and the pipes to it."""

    def __init__(self, command: list[str]) -> None:
        path = os.pathsep.join([_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        # The iteration order of sets must be the same in every worker.
        environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._buffer = b""

    def send(self, calls: list[list[Any]]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(calls).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise _LostError from error

    def read(self, within_s: float) -> tuple[Any, Any]:
        """Reads the next reply. Raises _LostError if none arrives in time."""
        assert self.process.stdout is not None
        descriptor, end = self.process.stdout.fileno(), time.monotonic() + within_s
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise _LostError
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise _LostError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        status, value = json.loads(line)
        return status, value

    def end(self) -> None:
        """Kills the process and the child that it forked, and closes the pipes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
