"""The combined resource use of a sandbox's processes, read from its own /proc. The caller, pid 1, is left out."""

from __future__ import annotations

import _socket as socket
import os

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def usage() -> tuple[int, float]:
    """Bytes of memory, counting a shared page once per process, and seconds of CPU time.

    The time includes that of living processes and of the children that they have waited for.
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


def _most_of_a_socket() -> int:
    """Bytes of memory that one socket can hold: it accepts messages until its buffer is full, and one more."""
    one = socket.socket(socket.AF_UNIX)
    size = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    one.close()
    return 2 * size + 65536


_SOCKET = _most_of_a_socket()


def socket_memory() -> int:
    """An upper bound, in bytes, of what this network namespace's sockets hold, including sockets closed while full.

    What they really hold is not visible: no process has it mapped.
    """
    try:
        with open("/proc/net/sockstat", "rb") as file:
            return int(file.readline().split()[2]) * _SOCKET
    except (OSError, IndexError, ValueError):
        return 0


class Starvation:
    """Measures how long the processes waited for CPUs that others had, from the kernel's account of every thread
    (/proc/PID/schedstat).

    While a process waits and all of them together run on less than one CPU, the missing part of that CPU is starvation.
    Processes that only crowd one another out are not starved, and a sleeping one does not wait. Of several waiting threads the
    longest wait counts: the sum of the waits of many short threads can be large even on idle CPUs.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before: dict[str, tuple[int, int]] = {}

    def look(self, elapsed_s: float) -> None:
        """Adds what happened since the last look, `elapsed_s` ago."""
        now: dict[str, tuple[int, int]] = {}
        ran = waited = 0
        for thread in _threads():
            try:
                with open(f"/proc/{thread}/schedstat", "rb") as file:
                    fields = file.read().split()
                now[thread] = int(fields[0]), int(fields[1])
            except (OSError, IndexError, ValueError):
                continue
            before = self._before.get(thread, (0, 0))
            ran += max(0, now[thread][0] - before[0])
            waited = max(waited, now[thread][1] - before[1])
        self._before = now
        self.seconds += max(0.0, min(waited / 1e9, elapsed_s - ran / 1e9))


def shared_memory_once() -> int:
    """Bytes of memory, counting each shared page once. Walks page tables, so it is slower than `usage`."""
    total = 0
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith(b"Pss:")) * 1024
        except (OSError, StopIteration):
            # It ended, or hides its maps: count all of its resident memory.
            try:
                with open(f"/proc/{pid}/statm", "rb") as file:
                    total += int(file.read().split()[1]) * _PAGE
            except OSError:
                continue
    return total


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _threads() -> list[str]:
    """ "PID/task/TID" of every thread."""
    found = []
    for pid in _pids():
        try:
            found += [f"{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
        except OSError:
            continue
    return found
