"""Seconds that a piece of work takes, and who else was working meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType


class Stopwatch:
    """`with Stopwatch() as watch: work()`, then `watch.seconds`, `watch.cpu_seconds` of this process, and `watch.others_cores`: how
    many cores everybody but this process used meanwhile, other guests of the host included (steal). Sides that spin while they
    wait show here. NaN where /proc does not say.
    """

    def __enter__(self) -> Stopwatch:
        self._busy_s, self._own_s, self._began = _machine_busy_s(), time.process_time(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._began
        self.cpu_seconds = time.process_time() - self._own_s
        self.others_cores = (_machine_busy_s() - self._busy_s - self.cpu_seconds) / self.seconds


def _machine_busy_s() -> float:
    """Seconds that all cores have worked since boot: user, nice, system, irq, softirq and steal of /proc/stat (proc(5))."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return float("nan")
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
