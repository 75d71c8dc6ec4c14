"""One process writes a run: a lock on a file that the kernel frees when its holder ends, however it ends."""

import fcntl
import os
from pathlib import Path

from nmoe.errors import UserError


class RunLock:
    """An exclusive lock on a file, which holds the number of the process that has it.

    Raises UserError when another process, or another RunLock of this one, holds it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip()
            self._close()
            raise UserError(
                f"{path.parent}: this run is being written by process {holder or 'unknown'}; "
                "wait for it to end, stop it, or choose another name with --run.name=NAME"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())
        _held.add(self)

    def release(self) -> None:
        """Gives the run up; a second call does nothing."""
        _held.discard(self)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: set[RunLock] = set()


def _let_go_in_child() -> None:
    # A forked worker shares the lock: left open there, a worker that outlives its killed parent would keep the run
    # locked. Closing the child's descriptor leaves the parent's lock in force.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
