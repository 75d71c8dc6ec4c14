"""A lock, so that only one process writes a run. The kernel releases it when the holder ends, even by `kill -9`."""

import os
from pathlib import Path

from filelock import FileLock, Timeout

from nmoe.errors import UserError


class RunLock:
    """An exclusive lock on a file, which holds the number of the process that has it.

    Raises UserError if another process, or another RunLock of this one, holds it. A forked child does not inherit it: a worker that
    outlives its killed parent leaves the run free.
    """

    def __init__(self, path: Path) -> None:
        # Not by thread, so that any thread can release it. Without flock there is no lock that a killed holder gives back.
        self._lock = FileLock(path, mode=0o644, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(blocking=False)
        except Timeout as error:
            holder = path.read_text(errors="replace").strip()
            raise UserError(
                f"{path.parent}: this run is being written by process {holder or 'unknown'}; "
                "wait for it to end, stop it, or choose another name with --run.name=NAME"
            ) from error
        path.write_text(f"{os.getpid()}\n")

    def release(self) -> None:
        """Releases the lock. A second call does nothing."""
        self._lock.release()
