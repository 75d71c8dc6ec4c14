"""Rules about the machine: full or slow disk, GPU memory, an idle GPU, a step that takes too long; and a counter of
suspended time."""

from __future__ import annotations

import shutil
import threading
import time
import weakref
from pathlib import Path
from statistics import median

import torch

from nmoe.config.tables.monitor import DiskSection, IdleSection, MemorySection, SlowDiskSection, StalledSection
from nmoe.model.device import kind_of
from nmoe.monitor.monitor import Metrics, Rule


class DiskRule(Rule[DiskSection]):
    """Fires when the disk that holds the run's directory is nearly full."""

    name = "disk"
    source = "training guidelines, checkpoints: disk"
    looks_around = True
    remedies = ("delete old runs, or lower checkpoint.keep", "raise checkpoint.every_steps")

    def __init__(self, settings: DiskSection, directory: Path) -> None:
        super().__init__(settings)
        self._directory = directory

    def symptom(self, metrics: Metrics) -> str | None:
        try:
            free = shutil.disk_usage(self._directory).free / 1e9
        except OSError:
            return None  # the directory is gone, which the next write will say
        return f"{free:.2f} GB are free where the run is written" if free < self.settings.free_gb else None


class SlowDiskRule(Rule[SlowDiskSection]):
    """Fires when saving a checkpoint delays the run for too long, compared with the time of the steps since the last save.

    Checkpoints are written during training, so a save delays the run only if the previous one is not finished.
    """

    name = "slow_disk"
    source = "training guidelines, checkpoints: disk"
    counts_itself = True
    remedies = (
        "raise checkpoint.every_steps",
        "set run.directory to a faster disk, or checkpoint.export_directory to another one",
    )

    def __init__(self, settings: SlowDiskSection) -> None:
        super().__init__(settings)
        self._steps_s, self._slow = 0.0, 0

    def symptom(self, metrics: Metrics) -> str | None:
        said, held = None, metrics.get("time_save_s")
        if held is not None:
            slow = held >= max(self.settings.seconds, self.settings.share * self._steps_s)
            self._slow = self._slow + 1 if slow else 0
            if self._slow >= self.settings.steps:
                said = f"saving held the run up for {held:.0f} s, and the steps before it took {self._steps_s:.0f} s"
            self._steps_s = 0.0
        self._steps_s += metrics.get("time_step_s", 0.0)
        return said


class MemoryRule(Rule[MemorySection]):
    """Fires when the GPU's memory is nearly full."""

    name = "memory"
    source = "training guidelines, monitoring: device memory above 95%"
    looks_around = True
    remedies = (
        "lower batch.tokens_per_microbatch, or set model.checkpoint_activations = true",
        "lower engine.cache_mb or engine.max_sequences",
        "end what else runs on the device",
    )

    def __init__(self, settings: MemorySection, device: torch.device) -> None:
        super().__init__(settings)
        self._device = device

    def symptom(self, metrics: Metrics) -> str | None:
        share = kind_of(self._device).peak_memory_share(self._device)
        return f"{share:.1%} of the memory of {self._device} was in use" if share > self.settings.above else None


# Seconds between two looks. A device that works at all is seen at work in some of the dozens of looks of a few minutes.
_LOOK_S = 5.0


class Pauses:
    """Measures the longest time in which a device was never observed at work."""

    def __init__(self, device: torch.device, now: float) -> None:
        self._device, self._busy_at, self._longest = device, now, 0.0
        self._lock = threading.Lock()

    def look(self, now: float) -> None:
        """Checks whether the device is busy at the time `now`, in seconds of a monotonic clock. A device that cannot report it
        counts as busy."""
        busy = kind_of(self._device).is_busy(self._device)
        with self._lock:
            if busy is False:
                self._longest = max(self._longest, now - self._busy_at)
            else:
                self._busy_at = now

    def take(self) -> float:
        """Returns the longest pause since the last call, in seconds, and resets it. A pause still in progress continues to be
        counted."""
        with self._lock:
            longest, self._longest = self._longest, 0.0
        return longest


class IdleRule(Rule[IdleSection]):
    """Fires when the GPU was idle for too long. A separate thread observes the device; the rule reports at the end of each step."""

    name = "idle"
    source = "training guidelines, monitoring: a device idle for minutes"
    looks_around = True
    remedies = (
        "look at time_rollout_s, time_grade_s and time_learn_s of the step: the longest says where",
        "tools and judges: lower [budget] wall_s and tool_s, or a reward's timeout_s; raise engine.max_sequences",
        "see with `nmoe doctor` whether the host has cores to spare",
    )

    def __init__(self, settings: IdleSection, device: torch.device) -> None:
        super().__init__(settings)
        self._device, self._pauses = device, Pauses(device, time.monotonic())
        over = threading.Event()
        # The thread ends with the rule.
        weakref.finalize(self, over.set)
        threading.Thread(target=_watch, args=(self._pauses, over), name="idle-device", daemon=True).start()

    def symptom(self, metrics: Metrics) -> str | None:
        longest = self._pauses.take()
        return f"{self._device} had nothing to do for {longest:.0f} s" if longest >= self.settings.seconds else None


def _watch(pauses: Pauses, over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        pauses.look(time.monotonic())


class StalledRule(Rule[StalledSection]):
    """Fires when a step takes far longer than the median of up to 50 earlier ones, from the sixth step on. Time in which the
    process was suspended does not count."""

    name = "stalled"
    source = "training guidelines, monitoring: a stalled rollout"
    remedies = (
        "look at time_rollout_s, time_grade_s and time_learn_s of the step: the longest says where",
        "lower [budget] wall_s and tool_s, or a reward's timeout_s",
        "see what else runs on the machine",
    )

    def __init__(self, settings: StalledSection) -> None:
        super().__init__(settings)
        self._seconds: list[float] = []
        self._suspension = watched()

    def symptom(self, metrics: Metrics) -> str | None:
        seconds = metrics.get("time_step_s")
        if seconds is None:
            return None
        seconds -= min(seconds, self._suspension.take(time.monotonic(), time.process_time()))
        usual = median(self._seconds) if len(self._seconds) >= 5 else None
        self._seconds = [*self._seconds[-49:], seconds]
        if usual is None or seconds < max(self.settings.seconds, self.settings.factor * usual):
            return None
        return f"the step took {seconds:.0f} s, and {usual:.1f} s is usual"


# Seconds between two beats, and by how much a beat has to be late to count: other work delays one, too.
_BEAT_S = 2.0
_LATE = 20.0
# A process that computes while no beat comes is busy, not suspended: the share of the gap that it computed for.
_BUSY = 0.05


class Suspension:
    """Counts the seconds in which the whole process was suspended, from gaps between the regular beats of a thread."""

    def __init__(self, now: float, cpu: float) -> None:
        """Starts to count at the time `now` of a monotonic clock, when the process had used `cpu` seconds of CPU time."""
        self._beat, self._cpu, self._lost = now, cpu, 0.0
        self._lock = threading.Lock()

    def beat(self, now: float, cpu: float) -> None:
        with self._lock:
            gap, computed = now - self._beat - _BEAT_S, cpu - self._cpu
            if gap > _LATE and computed < _BUSY * gap:
                self._lost += gap
            self._beat, self._cpu = now, cpu

    def take(self, now: float, cpu: float) -> float:
        """Returns the seconds of suspension since the last call, and resets the count."""
        self.beat(now, cpu)
        with self._lock:
            lost, self._lost = self._lost, 0.0
        return lost


def watched() -> Suspension:
    """Returns a `Suspension` of this process and starts the thread that updates it; the thread ends when the object is deleted."""
    suspension, over = Suspension(time.monotonic(), time.process_time()), threading.Event()
    weakref.finalize(suspension, over.set)
    threading.Thread(target=_keep_beating, args=(weakref.ref(suspension), over), name="suspension", daemon=True).start()
    return suspension


def _keep_beating(suspension: weakref.ref[Suspension], over: threading.Event) -> None:
    while not over.wait(_BEAT_S):
        if (alive := suspension()) is not None:
            alive.beat(time.monotonic(), time.process_time())
        del alive
