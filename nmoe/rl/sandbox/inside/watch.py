"""What the processes of a sandbox use together, read from its own /proc; only pid 1, which asks, is left out."""

from __future__ import annotations

import os

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def usage() -> tuple[int, float]:
    """Bytes of memory, a page that several processes share counted for each of them, and seconds of CPU time.

    The time is that of living processes and of the children they have waited for.
    """
    resident, seconds = 0, 0.0
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        seconds += sum(map(int, fields[11:15])) / _TICKS
        resident += int(fields[21]) * _PAGE
    return resident, seconds


def shared_memory_once() -> int:
    """Bytes of memory with every shared page counted once among those that share it. Walks page tables: slower than `usage`."""
    total = 0
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith(b"Pss:")) * 1024
        except (OSError, StopIteration):
            # It ended, or hides its maps: then all that it has resident counts.
            try:
                with open(f"/proc/{pid}/statm", "rb") as file:
                    total += int(file.read().split()[1]) * _PAGE
            except OSError:
                continue
    return total


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
