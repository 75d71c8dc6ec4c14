"""What a benchmark's numbers were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch
from calibration import calibration_s


def machine() -> dict[str, object]:
    """Processor, cores, torch's threads, operating system, and how fast that was at a fixed piece of work just now, by which
    times of two machines compare."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "calibration_s": round(calibration_s(), 4),
    }


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by package."""
    return {name: version(name) for name in packages}
