"""Saves the checkpoints of a run in a thread, so that training goes on while they are hashed and written."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from nmoe.errors import UserError
from nmoe.model.snapshot import Snapshot
from nmoe.runs.checkpoint import latest_checkpoint, mark_best, save_checkpoint
from nmoe.runs.state import Part, snapshot_parts
from nmoe.runs.storage import step_name


class Saver:
    """Saves a run's checkpoints, at most one at a time. The end of a `with` block waits for the one that is being written.

    By default a save copies the state to host memory and returns; a thread does the rest. Otherwise it returns when the checkpoint
    is written, and nothing is copied. `keep` is that of `save_checkpoint`.
    """

    def __init__(self, directory: Path, keep: int, asynchronous: bool = True) -> None:
        self._directory, self._keep, self._asynchronous = directory, keep, asynchronous
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, parts: Mapping[str, Part], best: bool = False) -> None:
        """Saves the parts as they are now, and then moves the link `latest`, and with `best` that one too. Waits for the save
        before, and raises its error.

        Raises UserError, with nothing written, if the disk has no room for it.
        """
        self.wait()
        snapshot = snapshot_parts(parts, copied=self._asynchronous)
        refuse_without_room(self._directory, step, snapshot.size)
        if not self._asynchronous:
            self._write(step, snapshot, best)
            return
        # Not a daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=self._try, args=(step, snapshot, best), name=f"save {step_name(step)}")
        self._thread.start()

    def check(self) -> None:
        """Raises the error of a save that failed meanwhile. Waits for nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being written. Raises the error of a save that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()  # the error that ends the run is the one to tell

    def _try(self, step: int, snapshot: Snapshot, best: bool) -> None:
        try:
            self._write(step, snapshot, best)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, snapshot: Snapshot, best: bool) -> None:
        saved = save_checkpoint(self._directory, step, snapshot.write, self._keep)
        if best:
            mark_best(saved)


def refuse_without_room(directory: Path, step: int, size: int) -> None:
    """Raises UserError if the disk of `directory`, which exists, has no room for a checkpoint with tensors of `size` bytes. It has
    to lie beside those that are there, which are removed only when it is whole."""
    newest = latest_checkpoint(directory)
    # Beside the tensors a checkpoint has small files, which the one before tells.
    before = 0 if newest is None else sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    needed, free = max(size, before), shutil.disk_usage(directory).free
    if needed <= free:
        return
    left = "there is none yet" if newest is None else f"{newest.name} is whole"
    raise UserError(
        f"{directory / step_name(step)}: not written, since a checkpoint takes {needed:,} bytes and {free:,} are free on its disk. "
        f"The run ends here; of its checkpoints {left}. Make room, lower checkpoint.keep, or move the run to another disk; it "
        "goes on with --run.resume=true."
    )
