"""Counts the CPU cores that this process may use and that are free, and chooses the number of threads."""

import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# More than any machine has cores: libgomp ends a process of a hundred thousand by a segmentation fault.
MOST_THREADS = 1024
_MEASURE_S = 0.2
_ASK_S = 120.0
# A core counts as free if others use less than this share of it; the background of an idle machine is about 0.02.
_NEGLIGIBLE_CORES = 0.25


def usable_cores() -> int:
    """Returns the number of cores that this process may use; all cores of the machine if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_threads(requested: int, processes: int = 1, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of threads to compute with: `requested` or, if that is 0, the user's OMP_NUM_THREADS or all
    available cores.

    The available cores are those that this process may use, within the CPU quota of its control group, divided by the
    `processes` that share them; at least 1. Other programs are ignored: the numbers of a run depend on its thread
    count, which must not depend on the load when the run began, and idle threads leave their cores to others
    (`nmoe.model.idle_threads`). OMP_NUM_THREADS is ignored if it is torchrun's default of 1, not a number, or larger
    than `MOST_THREADS`. Raises ValueError for a negative `requested`.
    """
    if requested < 0:
        raise ValueError(f"a thread count is positive, or 0 to choose one, got {requested}")
    if requested:
        return requested
    own = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if own.isdigit() and 0 < int(own) <= MOST_THREADS and not (own == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return int(own)
    return max(1, threads_for(usable_cores(), 0.0, cpu_quota()) // processes)


@functools.cache
def count_of_torch() -> int | None:
    """Returns the number of threads that torch chooses by default on this machine; None if this cannot be determined.

    Starts a new process that imports torch, which takes seconds.
    """
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_S)
        return int(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def free_cores() -> int:
    """Measures, over 0.2 s, how many cores other programs leave free, within the control group's quota; at least 1.

    Returns all cores on systems without /proc.
    """
    before = CoreTimes.now()
    time.sleep(_MEASURE_S)
    after = CoreTimes.now()
    if before is None or after is None:
        return threads_for(usable_cores(), 0.0, cpu_quota())
    used = after.used_by_others_since(before)
    return threads_for(usable_cores(), used, after.quota, after.used_of_quota_since(before))


@dataclass(frozen=True)
class CoreTimes:
    """CPU times in seconds at one moment.

    clock: the time of a monotonic clock.
    busy: the work of all processes on the usable cores since boot.
    own: the work of this process.
    quota: the CPU quota of this process's control group in cores, infinite without one; not a time.
    of_quota: the work that counts against the quota; None if it is unknown.
    """

    clock: float
    busy: float
    own: float
    quota: float = math.inf
    of_quota: float | None = None

    @classmethod
    def now(cls) -> "CoreTimes | None":
        """Reads the current times; returns None if the system does not report them."""
        try:
            stat = Path("/proc/stat").read_text()
        except OSError:
            return None
        busy = busy_seconds(stat, os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK"))
        return cls(time.monotonic(), busy, time.process_time(), *_quota_and_use(Path("/")))

    def used_by_others_since(self, before: "CoreTimes") -> float:
        """Returns how many cores other processes, including children of this one, used since `before`."""
        work = (self.busy - before.busy) - (self.own - before.own)
        return max(0.0, work) / (self.clock - before.clock)

    def used_of_quota_since(self, before: "CoreTimes") -> float:
        """Returns how many cores of this process's quota other processes used since `before`; 0 without a quota or if unknown."""
        if self.of_quota is None or before.of_quota is None:
            return 0.0
        return max(0.0, self.of_quota - before.of_quota - (self.own - before.own)) / (self.clock - before.clock)


def threads_for(cores: int, used_by_others: float, quota: float, used_of_quota: float = 0.0) -> int:
    """Returns how many whole cores are left of the usable cores and of the quota; at least 1.

    `used_by_others` is subtracted from `cores`, and `used_of_quota` from `quota`, which may be infinite; all are in
    cores.
    """
    free = cores - max(0.0, used_by_others - _NEGLIGIBLE_CORES)
    allowed = quota - max(0.0, used_of_quota - _NEGLIGIBLE_CORES)
    return max(1, math.floor(min(free, allowed)))


def busy_seconds(stat: str, cores: set[int], ticks_per_second: int) -> float:
    """Returns the seconds that `cores` have worked since boot, from the text of /proc/stat (proc(5)).

    Its columns are user, nice, system, idle, iowait, irq, softirq, steal; a guest's time is already part of user.
    """
    ticks = 0
    for line in stat.splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, columns[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / ticks_per_second


def cpu_quota(root: Path = Path("/")) -> float:
    """Returns the cores that the control groups of this process allow it; infinite if there is no limit or it cannot be read.

    The tightest limit of all parent groups counts, in version 2 (`cpu.max`) and in version 1 (`cpu.cfs_quota_us`).
    `root` is the directory of proc/ and sys/.
    """
    return min((_limit(directory) for directory in _groups(root)), default=math.inf)


def _quota_and_use(root: Path) -> tuple[float, float | None]:
    """Returns the CPU quota in cores, and the seconds of work that counted against it; None without a quota or if unknown."""
    quota, group = min(((_limit(directory), directory) for directory in _groups(root)), default=(math.inf, root))
    if math.isinf(quota):
        return quota, None
    try:
        if (unified := group / "cpu.stat").exists() and "usage_usec" in (said := unified.read_text()):
            return quota, int(said.split()[said.split().index("usage_usec") + 1]) / 1e6
        return quota, int((group / "cpuacct.usage").read_text()) / 1e9
    except (OSError, ValueError):
        return quota, None


def _groups(root: Path) -> list[Path]:
    """Returns the directories of the control groups that may limit this process's CPU time."""
    try:
        parts = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    groups = []
    for _, controllers, group in parts:
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        directory = mount / group.lstrip("/")
        groups += [one for one in (directory, *directory.parents) if one.is_relative_to(mount)]
    return groups


def _limit(directory: Path) -> float:
    """Returns the cores that one control group allows; infinite if it sets no limit or no longer exists."""
    unified, quota_file = directory / "cpu.max", directory / "cpu.cfs_quota_us"
    try:
        if unified.exists():
            quota, period = unified.read_text().split()
        elif quota_file.exists():
            quota, period = quota_file.read_text(), (directory / "cpu.cfs_period_us").read_text()
        else:
            return math.inf
        # Without a limit, version 2 says "max" and version 1 says -1.
        return math.inf if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf
