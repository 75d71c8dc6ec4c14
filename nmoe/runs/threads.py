"""The number of threads to compute with: as many as there are free cores.

With one thread more than there are free cores, every small operation waits for the scheduler: up to 60 times slower.
"""

import math
import os
import time
from pathlib import Path

_MEASURE_S = 0.2
# A core counts as free if others use less than this share of it; the background of an idle machine is about 0.02.
_NEGLIGIBLE_CORES = 0.25


def usable_cores() -> int:
    """The number of cores that this process may use; all cores if the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_threads(requested: int) -> int:
    """The thread count to use: `requested`, or for 0 the number of cores that are free now, at least 1.

    The free cores are those this process may run on, minus what other processes use of them over 0.2 s, and at most the CPU
    quota of the control group. Without /proc all cores count as free. Raises ValueError for a negative number.
    """
    if requested < 0:
        raise ValueError(f"a thread count is positive, or 0 to choose one, got {requested}")
    if requested:
        return requested
    if not Path("/proc/stat").exists():
        return os.cpu_count() or 1
    cores = os.sched_getaffinity(0)
    return threads_for(len(cores), _cores_used_by_others(cores), cpu_quota())


def threads_for(cores: int, used_by_others: float, quota: float) -> int:
    """Whole cores left of `cores` after `used_by_others`, within `quota`; both in cores, `quota` may be infinite."""
    free = math.floor(cores - used_by_others + _NEGLIGIBLE_CORES)
    return max(1, free if math.isinf(quota) else min(free, math.floor(quota)))


def busy_seconds(stat: str, cores: set[int], ticks_per_second: int) -> float:
    """Seconds that `cores` have worked since boot, from the text of /proc/stat (proc(5)).

    Its columns are user, nice, system, idle, iowait, irq, softirq, steal; a guest's time is part of user already.
    """
    ticks = 0
    for line in stat.splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, columns[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / ticks_per_second


def cpu_quota(root: Path = Path("/")) -> float:
    """Cores that the control groups of this process allow it, infinite without a limit.

    The tightest limit of all parent groups counts, in version 2 (`cpu.max`) and in version 1 (`cpu.cfs_quota_us`). `root` is
    the directory of proc/ and sys/.
    """
    quota = math.inf
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return quota
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        place = mount / group.lstrip("/")
        for directory in [place, *place.parents]:
            quota = min(quota, _limit(directory))
            if directory == mount:
                break
    return quota


def _limit(directory: Path) -> float:
    """The cores that one control group allows; infinite if it sets no limit."""
    unified, quota_file = directory / "cpu.max", directory / "cpu.cfs_quota_us"
    if unified.exists():
        quota, period = unified.read_text().split()
    elif quota_file.exists():
        quota, period = quota_file.read_text(), (directory / "cpu.cfs_period_us").read_text()
    else:
        return math.inf
    # Without a limit, version 2 says "max" and version 1 says -1.
    return math.inf if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


def _cores_used_by_others(cores: set[int]) -> float:
    ticks_per_second = os.sysconf("SC_CLK_TCK")

    def measure() -> tuple[float, float, float]:
        busy = busy_seconds(Path("/proc/stat").read_text(), cores, ticks_per_second)
        return busy, time.process_time(), time.perf_counter()

    busy_before, own_before, before = measure()
    time.sleep(_MEASURE_S)
    busy_after, own_after, after = measure()
    return max(0.0, (busy_after - busy_before) - (own_after - own_before)) / (after - before)
