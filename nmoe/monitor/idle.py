"""A device that has nothing to do for minutes."""

from __future__ import annotations

import threading
import time
import weakref

import torch

from nmoe.config.tables.monitor import IdleSection
from nmoe.model.device import kind_of
from nmoe.monitor.rule import Metrics, Rule

# Seconds between two looks. A device that works at all is seen at work in some of the dozens of looks of a few minutes.
_EVERY = 5.0


class Pauses:
    """The longest time in which a device was not seen at work."""

    def __init__(self, device: torch.device, now: float) -> None:
        self._device, self._busy_at, self._longest = device, now, 0.0
        self._lock = threading.Lock()

    def look(self, now: float) -> None:
        """Asks the device whether it is at work, `now` being the time in seconds of any clock that only advances. A device that
        cannot tell counts as at work."""
        busy = kind_of(self._device).is_busy(self._device)
        with self._lock:
            if busy is False:
                self._longest = max(self._longest, now - self._busy_at)
            else:
                self._busy_at = now

    def take(self) -> float:
        """The longest pause since the last call, in seconds. One that has begun goes on."""
        with self._lock:
            longest, self._longest = self._longest, 0.0
        return longest


class IdleRule(Rule[IdleSection]):
    """Looks at the device from a thread of its own, and reports at the end of a step what was seen during it."""

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
    while not over.wait(_EVERY):
        pauses.look(time.monotonic())
