"""Lets the idle threads of OpenMP sleep while other programs need the cores, and spin while these are free.

A thread that waits for the others of its team spins: waking one that sleeps takes longer than most operations of a small model.
Beside other programs this is ruinous. Who spins uses up the time of the thread that it waits for, and a step takes up to thirty
times as long. So no fixed setting is good at both (docs/decisions.md has the figures), and this module chooses by what other
programs use of the cores, looked at once a second in between two steps of the engine or two micro-batches of the learner.

The number of threads stays, and with it every sum and every bit of a result. A setting of the user's (`_OWN_SETTINGS`) stays, too.

- libgomp (GCC's, in torch's Linux packages) reads how long to spin when it is loaded, but spins a hundredth of a millisecond only
  while a process has more threads than cores (its manual, GOMP_SPINCOUNT). So a thread of our own holds a team of its own, idle,
  that makes them more. Where that ends, its team ends with it.
- libomp (LLVM's and Intel's) has a function for it, `kmp_set_blocktime`, which counts for the thread that calls it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from nmoe.cores import CoreTimes, cpu_quota, threads_for, usable_cores

_OWN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME", "KMP_LIBRARY")
_LOOK_S = 1.0
# A longer gap says nothing of the present: nothing was computed in it.
_STALE_S = 60.0
# So many looks in a row must find the cores free before threads spin again.
_FREE_LOOKS = 3
_CORES_AT_START = usable_cores()  # libgomp counts them when it is loaded


class Runtime(Protocol):
    """How the idle threads of an OpenMP runtime are steered. `sleep` says whether it could be done;
    while they sleep, `again` is called once a second where a thread is there to call it."""

    name: str

    def sleep(self, threads: int, again: Callable[[], None]) -> bool: ...

    def spin(self) -> None: ...


class Libgomp:
    """GCC's runtime: a team of idle threads makes its threads more than the cores."""

    name = "libgomp"

    def __init__(self, parallel: Callable[[int, int], None]) -> None:
        """`parallel(n, 0)` runs an empty team of n threads."""
        self._parallel = parallel
        self._end = threading.Event()

    def sleep(self, threads: int, again: Callable[[], None]) -> bool:
        """Returns once idle threads sleep, or at once where the system refuses that many threads: libgomp would end the process."""
        # The process's first team has `threads`; with these libgomp counts cores + 1.
        team = max(2, max(usable_cores(), _CORES_AT_START) - threads + 2)
        if not can_start(team):
            return False
        ready, end = threading.Event(), threading.Event()
        self._end = end

        def hold() -> None:
            self._parallel(team, 0)
            ready.set()
            while not end.wait(_LOOK_S):
                again()

        threading.Thread(target=hold, name="nmoe idle threads", daemon=True).start()
        ready.wait()
        return True

    def spin(self) -> None:
        self._end.set()


class Libomp:
    """LLVM's and Intel's runtime: the milliseconds that an idle thread spins are set by a function."""

    name = "libomp"

    def __init__(self, get: Callable[[], int], set_: Callable[[int], None]) -> None:
        self._get, self._set, self._before = get, set_, 0

    def sleep(self, threads: int, again: Callable[[], None]) -> bool:
        self._before = self._get()
        self._set(0)
        return True

    def spin(self) -> None:
        self._set(self._before)


def can_start(count: int) -> bool:
    """Whether the system lets this process have so many threads more: control groups and containers have limits."""
    end, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        end.set()
        for thread in started:
            thread.join()
    return True


def find_runtime() -> Runtime | None:
    """The OpenMP runtime that torch computes with, on Linux; None for one that is not known."""
    if platform.system() != "Linux":
        return None
    for library in (ctypes.CDLL(None), *_torch_cpu()):
        if (set_blocktime := getattr(library, "kmp_set_blocktime", None)) is not None:
            set_blocktime.argtypes, set_blocktime.restype = [ctypes.c_int], None
            return Libomp(library.kmp_get_blocktime, set_blocktime)
        if (parallel := getattr(library, "GOMP_parallel", None)) is not None:
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            nothing = ctypes.cast(library.free, ctypes.c_void_p)  # free(NULL), the body of an empty team
            return Libgomp(partial(parallel, nothing, None))
    return None


def _torch_cpu() -> list[ctypes.CDLL]:
    """Torch's library, in whose dependencies a name is looked for that is not among those of the whole process."""
    return [ctypes.CDLL(str(file)) for file in Path(torch.__file__).parent.glob("lib/libtorch_cpu.so")]


class IdleThreads:
    """How the idle threads of this process wait.

    runtime: what is steered; None where nothing can be.
    own: the user's own setting, such as `GOMP_SPINCOUNT=1000`, which stays; None without one.
    sleeping: whether idle threads sleep now.
    used_by_others: the cores that other programs used when that was last looked at.
    slept: how often they were sent to sleep.
    """

    def __init__(
        self,
        runtime: Runtime | None,
        environment: Mapping[str, str] = os.environ,
        times: Callable[[], CoreTimes | None] = CoreTimes.now,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[], int] = torch.get_num_threads,
    ) -> None:
        self.own = next((f"{name}={environment[name]}" for name in _OWN_SETTINGS if name in environment), None)
        self.runtime = None if self.own or times() is None else runtime
        self.sleeping, self.used_by_others, self.slept = False, 0.0, 0
        self._times, self._clock, self._threads = times, clock, threads
        self._next, self._before, self._free = clock(), None, 0
        self._lock = threading.Lock()

    _before: CoreTimes | None

    def look(self) -> None:
        """Looks at what other programs use of the cores, at most once a second, and lets idle threads sleep or spin. For the thread
        that computes: it costs the reading of a clock otherwise."""
        if self._clock() < self._next or self.runtime is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._look(self.runtime)
        finally:
            self._lock.release()

    def _look(self, runtime: Runtime) -> None:
        threads, before, now = self._threads(), self._before, self._times()
        self._next, self._before = self._clock() + _LOOK_S, now
        if now is None or before is None or now.clock - before.clock > _STALE_S:
            return
        cores = usable_cores()
        self.used_by_others = now.used_by_others_since(before)
        contended = threads > 1 and threads_for(cores, self.used_by_others, cpu_quota()) < threads
        self._free = 0 if contended else self._free + 1
        if contended and not self.sleeping:
            self.sleeping = True  # the thread that `sleep` starts may look
            if runtime.sleep(threads, self.look):
                self.slept += 1
            else:
                self.sleeping, self.runtime = False, None
        elif self.sleeping and self._free >= _FREE_LOOKS:
            self.sleeping = False
            runtime.spin()

    def restore(self) -> None:
        """Lets idle threads spin again, as before the first look."""
        with self._lock:
            if self.sleeping and self.runtime is not None:
                self.runtime.spin()
            self.sleeping = False

    def describe(self) -> str:
        """What idle threads do, as the end of a sentence."""
        if self.own is not None:
            return f"wait as {self.own} says"
        if self.runtime is None:
            return "wait as their OpenMP runtime has it"
        return f"spin while the cores are free, and sleep while other programs need them ({self.runtime.name})"


IDLE = IdleThreads(find_runtime())
"""Those of this process: there is one OpenMP runtime, whatever runs in it."""
