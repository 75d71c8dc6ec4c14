"""How long this process was suspended (SIGSTOP, a frozen container), which a step's wall time does not tell from a stall."""

from __future__ import annotations

import threading
import time
import weakref

# Seconds between two beats, and by how much a beat has to be late to count: other work delays one, too.
_EVERY = 2.0
_LATE = 20.0
# A process that computes while no beat comes is busy, not suspended: the share of the gap that it computed for.
_BUSY = 0.05


class Suspension:
    """Counts the seconds in which nothing of the process ran, from the beats of a thread."""

    def __init__(self, now: float, cpu: float) -> None:
        """`now` is the time of a clock that only advances, and `cpu` the process's CPU time, in seconds."""
        self._beat, self._cpu, self._lost = now, cpu, 0.0
        self._lock = threading.Lock()

    def beat(self, now: float, cpu: float) -> None:
        with self._lock:
            gap, computed = now - self._beat - _EVERY, cpu - self._cpu
            if gap > _LATE and computed < _BUSY * gap:
                self._lost += gap
            self._beat, self._cpu = now, cpu

    def take(self, now: float, cpu: float) -> float:
        """The seconds of suspension since the last call."""
        self.beat(now, cpu)
        with self._lock:
            lost, self._lost = self._lost, 0.0
        return lost


def watched() -> Suspension:
    """A suspension of this process, with its thread, which ends with it."""
    suspension, over = Suspension(time.monotonic(), time.process_time()), threading.Event()
    weakref.finalize(suspension, over.set)
    threading.Thread(target=_keep_beating, args=(weakref.ref(suspension), over), name="suspension", daemon=True).start()
    return suspension


def _keep_beating(suspension: weakref.ref[Suspension], over: threading.Event) -> None:
    while not over.wait(_EVERY):
        if (alive := suspension()) is not None:
            alive.beat(time.monotonic(), time.process_time())
        del alive
