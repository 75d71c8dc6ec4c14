"""A disk that is nearly full."""

from __future__ import annotations

import shutil
from pathlib import Path

from nmoe.config.tables.monitor import DiskSection
from nmoe.monitor.rule import Metrics, Rule


class DiskRule(Rule[DiskSection]):
    name = "disk"
    source = "training guidelines, checkpoints: disk"
    looks_around = True
    remedies = (
        "delete old runs, or lower checkpoint.keep",
        "raise checkpoint.every_steps",
    )

    def __init__(self, settings: DiskSection, directory: Path) -> None:
        super().__init__(settings)
        self._directory = directory

    def symptom(self, metrics: Metrics) -> str | None:
        try:
            free = shutil.disk_usage(self._directory).free / 1e9
        except OSError:
            return None  # the directory is gone, which the next write will say
        return f"{free:.2f} GB are free where the run is written" if free < self.settings.free_gb else None
