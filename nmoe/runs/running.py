"""Whether a run goes on, asked without taking its lock."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_LOCKS = Path("/proc/locks")
LOCK = ".lock"
"""The file in a run's directory that the writing process has locked."""


def is_running(path: Path) -> bool:
    """Returns whether a process of this machine holds the run's lock.

    Linux lists the locks that are held, so that the question takes none, and a run that starts at this moment is not refused.
    """
    lock = path / LOCK
    try:
        holder = int(lock.read_text())
        os.kill(holder, 0)
    except PermissionError:
        return True  # a process of another user
    except (OSError, ValueError):
        return False
    # The number may be another process's by now: only one that holds the lock is the run.
    try:
        locks = [line.split() for line in _LOCKS.read_text().splitlines()]
        inode = str(lock.stat().st_ino)
    except OSError:
        return _is_locked(lock)
    # 38: FLOCK  ADVISORY  WRITE 23324 fe:00:2261047 0 EOF
    held = [line for line in locks if "WRITE" in line]
    if any(part.endswith(f":{inode}") for line in held for part in line):
        return True
    # In a layered file system the list may number the file otherwise.
    return any(str(holder) in line for line in held) and _is_locked(lock)


def _is_locked(lock: Path) -> bool:
    """Asks for a shared lock, which is had at once, and given back, unless the run holds its own."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
