"""The processor: its name and its features, from Linux."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """The processor's name for itself, or what Python knows of it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features() -> set[str]:
    """What the processor can do, in the words of /proc/cpuinfo (`avx2`, `avx512f`); empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    # "flags" on x86, "Features" on ARM
    return next(
        (set(line.split(":", 1)[1].split()) for line in lines if line.lower().startswith(("flags", "feat"))), set()
    )
