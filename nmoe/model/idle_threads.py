"""Lets the idle threads of OpenMP sleep while other processes need the cores, and spin while these are free.

A thread that waits for the others of its team spins: waking one that sleeps takes longer than most operations of a small model.
Beside other processes this is ruinous. A spinning thread takes the time of the thread that it waits for, and a step takes up to
thirty times as long. So no fixed setting is good at both (docs/decisions.md has the figures), and this module chooses by what other
processes use of the cores and of the CPU quota, looked at once a second in between two steps of the engine or two micro-batches of
the learner.

The number of threads stays, and with it every sum and every bit of a result. A setting of the user's (`_OWN_SETTINGS`) stays, too.
Any failure ends the looking for good, and leaves the runtime's default.

libgomp (GCC's, in torch's Linux packages) reads how long to spin when it is loaded, but spins a hundredth of a millisecond only
while a process has more threads than cores (its manual, GOMP_SPINCOUNT). So a thread of our own holds its own team, idle, that
makes them more. The team ends with that thread. Other runtimes are left alone: libomp's `kmp_set_blocktime` counts only for the
thread that calls it.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from nmoe.cores import CoreTimes, threads_for, usable_cores

_OWN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY")
_LOOK_S = 1.0
# A longer gap says nothing of the present: nothing was computed in it.
_STALE_S = 60.0
# So many looks in a row must find the cores free before threads spin again.
_FREE_LOOKS = 3
# The test of whether a team can be had asks for so many times its threads: another process may start some meanwhile.
_MARGIN = 2
# Starting a team and ending one takes milliseconds.
_READY_S = 10.0
_CORES_AT_START = usable_cores()  # libgomp counts them when it is loaded


class Libgomp:
    """Controls GCC's OpenMP runtime, whose waiting threads sleep while the process has more OpenMP threads than cores: a team of
    idle threads exceeds that number."""

    name = "libgomp"

    def __init__(self, parallel: Callable[[int, int], None]) -> None:
        """Makes a controller of the runtime. `parallel(n, 0)` runs an empty team of n threads."""
        self._parallel = parallel
        self._end = threading.Event()

    def sleep(self, threads: int, again: Callable[[], None]) -> bool:
        """Lets idle threads sleep, and calls `again` once a second while they do. Returns False if the system may refuse the extra
        threads, because libgomp would then end the process, or if they do not start in time."""
        # The process's first team has `threads`; with these libgomp counts cores + 1.
        team = max(2, max(usable_cores(), _CORES_AT_START) - threads + 2)
        if not can_start(_MARGIN * team):
            return False
        ready, end = threading.Event(), threading.Event()
        self._end = end

        def hold() -> None:
            try:
                self._parallel(team, 0)
            except Exception:
                end.set()
            finally:
                ready.set()
            while not end.wait(_LOOK_S):
                again()

        threading.Thread(target=hold, name="nmoe idle threads", daemon=True).start()
        if not ready.wait(_READY_S):
            end.set()
        return not end.is_set()

    def spin(self) -> None:
        self._end.set()


def can_start(count: int) -> bool:
    """Returns whether the system lets this process start `count` more threads: control groups and containers have limits. Tries
    it; the threads have ended when this returns True."""
    end, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        return False
    finally:
        end.set()
        for thread in started:
            thread.join()
    # One that is joined counts until the kernel has let it go.
    last = time.monotonic() + _READY_S
    while any(Path(f"/proc/self/task/{thread.native_id}").exists() for thread in started):
        if time.monotonic() > last:
            return False
        time.sleep(0.001)
    return True


def find_runtime() -> Libgomp | None:
    """Returns GCC's OpenMP runtime if torch computes with it on Linux, else None."""
    if platform.system() != "Linux":
        return None
    for library in _libraries():
        if hasattr(library, "kmp_set_blocktime"):  # libomp, which has GOMP_parallel too
            return None
        if (parallel := getattr(library, "GOMP_parallel", None)) is not None:
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            nothing = ctypes.cast(library.free, ctypes.c_void_p)  # free(NULL), the body of an empty team
            return Libgomp(partial(parallel, nothing, None))
    return None


def _libraries() -> Iterator[ctypes.CDLL]:
    """Yields the libraries to search for the OpenMP runtime: the whole process, then torch's CPU library and its dependencies."""
    try:
        yield ctypes.CDLL(None)
        yield from (ctypes.CDLL(str(file)) for file in Path(torch.__file__).parent.glob("lib/libtorch_cpu.so"))
    except OSError:
        return


class IdleThreads:
    """Decides whether the idle OpenMP threads of this process spin or sleep.

    runtime: the OpenMP runtime that is controlled; None if none can be, and after a failure.
    own: the user's own setting, such as `GOMP_SPINCOUNT=1000`, which is left as it is; None without one.
    sleeping: whether idle threads sleep now.
    why: what the last look found, such as "other processes use 1.4 cores".
    slept: how many times idle threads were sent to sleep.
    """

    def __init__(
        self,
        runtime: Libgomp | None,
        environment: Mapping[str, str] = os.environ,
        times: Callable[[], CoreTimes | None] = CoreTimes.now,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[], int] = torch.get_num_threads,
    ) -> None:
        self.own = next((f"{name}={environment[name]}" for name in _OWN_SETTINGS if name in environment), None)
        self.runtime = None if self.own else runtime
        self.sleeping, self.why, self.slept = False, "", 0
        self._times, self._clock, self._threads = times, clock, threads
        self._next, self._before, self._free = clock(), None, 0
        self._lock = threading.Lock()

    _before: CoreTimes | None

    def look(self) -> None:
        """Measures, at most once a second, how much other processes use the cores, and lets idle threads sleep or spin accordingly.
        Call it from the thread that computes: between measurements it only reads a clock. Never raises: a failure ends the control
        of idle threads."""
        if self._clock() < self._next or (runtime := self.runtime) is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._look(runtime)
        except Exception:
            self.runtime, self.sleeping = None, False
            runtime.spin()
        finally:
            self._lock.release()

    def _look(self, runtime: Libgomp) -> None:
        threads, before, now = self._threads(), self._before, self._times()
        self._next, self._before = self._clock() + _LOOK_S, now
        if now is None:
            raise OSError("the system does not say how busy its cores are")
        if before is None or now.clock - before.clock > _STALE_S:
            return
        contended = threads > 1 and self._left(before, now) < threads
        self._free = 0 if contended else self._free + 1
        if contended and not self.sleeping:
            if not runtime.sleep(threads, self.look):
                raise OSError("the system may refuse the threads")
            self.sleeping, self.slept = True, self.slept + 1
        elif self.sleeping and self._free >= _FREE_LOOKS:
            self.sleeping = False
            runtime.spin()

    def _left(self, before: CoreTimes, now: CoreTimes) -> int:
        """Returns the number of cores that other processes leave, of the usable cores or of the CPU quota, whichever is fewer."""
        used, used_of_quota = now.used_by_others_since(before), now.used_of_quota_since(before)
        cores = usable_cores()
        left = threads_for(cores, used, now.quota, used_of_quota)
        if left < threads_for(cores, used, math.inf):
            self.why = f"the CPU quota is {now.quota:g} cores, of which other processes use {used_of_quota:.1f}"
        else:
            self.why = f"other processes use {used:.1f} cores"
        return left

    def restore(self) -> None:
        """Lets idle threads spin again, as before the first look."""
        with self._lock:
            if self.sleeping and self.runtime is not None:
                self.runtime.spin()
            self.sleeping = False

    def leave(self) -> None:
        """Ends the control of idle threads in a forked child, which has no OpenMP team, and a copied lock that may never be
        released."""
        self.runtime, self.sleeping, self._lock = None, False, threading.Lock()

    def describe(self) -> str:
        """Returns what idle threads do, as the predicate of a sentence: "spin while the cores are free, and ..."."""
        if self.own is not None:
            return f"wait as {self.own} says"
        if self.runtime is None:
            return "use the OpenMP runtime's default"
        return f"spin while the cores are free, and sleep while other processes need them ({self.runtime.name})"


IDLE = IdleThreads(find_runtime())
"""The idle threads of this process, which has one OpenMP runtime."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=IDLE.leave)
