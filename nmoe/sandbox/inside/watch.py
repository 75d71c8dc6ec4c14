"""Measures the combined resource use of a sandbox's processes from its own /proc. The calling agent, pid 1, is left out."""

from __future__ import annotations

import _socket as socket
import os

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Usage:
    """Measures memory and CPU time of the processes by repeated looks: `Usage().look({})` returns 31457280 bytes, and `seconds`
    grows.

    A child whose parent ignores SIGCHLD vanishes when it ends, and no process's times include it. So the times of living processes
    are added up as they grow. A parent's times of its children add only the part that was not seen while they lived. The time that
    such a child used after it was last seen is lost, so looks should be frequent while `hidden`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.hidden = False  # whether processes or threads ended between the last two looks, or came and went
        self._before: dict[str, tuple[bytes, str, float, float]] = {}  # pid: start, parent, own and children's seconds
        self._last_pid = _last_pid()

    def look(self, reaped: dict[str, float]) -> int:
        """Adds the CPU time since the last look to `seconds`. Returns bytes of memory, counting a shared page once per process.

        `reaped` are the processes that the caller has waited for since the last look: their CPU seconds, children included, by pid.
        """
        now: dict[str, tuple[bytes, str, float, float]] = {}
        resident = 0
        for pid in _pids():
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            own, children = (sum(map(int, fields[n : n + 2])) / _TICKS for n in (11, 13))
            if own < _COARSE_S:
                own = max(own, _run_s(pid, fields[17] == b"1"))
            now[pid] = fields[19], fields[1].decode(), own, children
            resident += int(fields[21]) * _PAGE
        self._add(now, reaped)
        return resident

    def end(self, reaped: dict[str, float]) -> None:
        """Adds the CPU time of the last processes, when none is left."""
        self._add({}, reaped)

    def _add(self, now: dict[str, tuple[bytes, str, float, float]], reaped: dict[str, float]) -> None:
        before = self._before
        gone = {pid for pid, one in before.items() if pid not in now or now[pid][0] != one[0]}
        # CPU time of ended processes, by the process that waited for them or for their parents.
        known = dict.fromkeys(reaped, 0.0)
        for pid in gone:
            heir = pid
            while heir in gone and heir not in reaped:
                heir = before[heir][1]
            known[heir] = known.get(heir, 0.0) + before[pid][2] + before[pid][3]
        for pid, seconds in reaped.items():
            self.seconds += max(0.0, seconds - known[pid])
        for pid, (start, parent, own, children) in now.items():
            _, _, own_before, children_before = (
                before[pid] if pid in before and pid not in gone else (b"", "", 0.0, 0.0)
            )
            own = max(own, own_before)
            now[pid] = start, parent, own, children
            self.seconds += own - own_before + max(0.0, children - children_before - known.get(pid, 0.0))
        last_pid = _last_pid()
        self.hidden = bool(gone) or last_pid - self._last_pid > len(now.keys() - before.keys())
        self._before, self._last_pid = now, last_pid


# Process times are counted in ticks of 10 ms; a process that used less than this is read in nanoseconds.
_COARSE_S = 0.1


def _run_s(pid: str, one_thread: bool) -> float:
    """Returns the seconds that the living threads of a process have run, by the kernel's schedstat of each; 0 if it has none."""
    ran = 0
    try:
        threads = [pid] if one_thread else [f"{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
        for thread in threads:
            with open(f"/proc/{thread}/schedstat", "rb") as file:
                ran += int(file.read().split()[0])
    except (OSError, IndexError, ValueError):
        pass
    return ran / 1e9


def _last_pid() -> int:
    """Returns the pid, in this namespace, of the newest process or thread."""
    with open("/proc/loadavg", "rb") as file:
        return int(file.read().split()[4])


def _most_of_a_socket() -> int:
    """Returns the bytes of memory that one socket can hold: it accepts messages until its buffer is full, and one more."""
    one = socket.socket(socket.AF_UNIX)
    size = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    one.close()
    return 2 * size + 65536


_SOCKET = _most_of_a_socket()


def socket_memory() -> int:
    """Returns an upper bound, in bytes, of the memory that this network namespace's sockets hold, including sockets closed while
    full.

    Their actual use is not visible, because no process has it mapped.
    """
    try:
        with open("/proc/net/sockstat", "rb") as file:
            return int(file.readline().split()[2]) * _SOCKET
    except (OSError, IndexError, ValueError):
        return 0


class Starvation:
    """Measures how long the processes waited for CPUs that processes outside had, from the kernel's account of every thread
    (/proc/PID/schedstat).

    While a process waits and all of them together run on less than one CPU, the missing part of that CPU is starvation. Processes
    that only crowd one another out are not starved, and a sleeping one does not wait. If several threads wait, the longest wait
    counts: the sum of the waits of many short threads can be large even on idle CPUs. If processes ended unseen, their run time is
    missing from the account, as if processes outside had run; such an interval counts as no starvation.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        # Of each thread: nanoseconds that it ran, that it waited as the kernel says, and as they were counted here; and whether it
        # was ready to run.
        self._before: dict[str, tuple[int, int, int, bool]] = {}

    def look(self, elapsed_s: float, *, hidden: bool = False) -> None:
        """Adds to `seconds` how long processes waited for a CPU in the last `elapsed_s` seconds, since the last call.

        `hidden` says that some processes ended since then.
        """
        now: dict[str, tuple[int, int, int, bool]] = {}
        ran = waited = 0
        for thread in _threads():
            try:
                with open(f"/proc/{thread}/schedstat", "rb") as file:
                    fields = file.read().split()
                runs, waits = int(fields[0]), int(fields[1])
                before, ready = self._before.get(thread, (0, 0, 0, False)), _is_ready(thread)
                # The kernel adds a wait once it is over, and one can be longer than the deadline.
                still = ready and before[3] and before[:2] == (runs, waits)
            except (OSError, IndexError, ValueError):
                continue
            counted = before[2] + int(elapsed_s * 1e9) if still else max(before[2], waits)
            now[thread] = runs, waits, counted, ready
            ran += max(0, runs - before[0])
            waited = max(waited, counted - before[2])
        self._before = now
        if not hidden:
            self.seconds += max(0.0, min(waited / 1e9, elapsed_s - ran / 1e9))


def _is_ready(thread: str) -> bool:
    """Whether a thread runs or waits for a CPU."""
    with open(f"/proc/{thread}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"R"


def shared_memory_once() -> int:
    """Returns bytes of memory, counting each shared page once. Reads the page tables, so it is slower than `Usage.look`."""
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
    """Returns the paths "PID/task/TID" of all threads, relative to /proc."""
    found = []
    for pid in _pids():
        try:
            found += [f"{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
        except OSError:
            continue
    return found
