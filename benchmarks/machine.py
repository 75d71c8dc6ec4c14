"""What a benchmark's numbers were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch


def machine() -> dict[str, object]:
    """Processor, cores, torch's threads and operating system."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.platform()}


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by package."""
    return {name: version(name) for name in packages}
