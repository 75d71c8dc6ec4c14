"""A disk so slow that the run waits for it."""

from __future__ import annotations

from nmoe.config.tables.monitor import SlowDiskSection
from nmoe.monitor.rule import Metrics, Rule


class SlowDiskRule(Rule[SlowDiskSection]):
    """Compares the seconds that a save held the run up with those of the steps since the save before. A save is written while
    training goes on, so that it holds the run up where the one before is not yet on the disk."""

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
