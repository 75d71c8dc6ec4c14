"""Saves the checkpoints of a run in a thread, so that training goes on while they are hashed and written."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from nmoe.errors import UserError
from nmoe.model.snapshot import Snapshot
from nmoe.runs.checkpoint import MANIFEST, checkpoint_step, latest_checkpoint, mark_best, save_checkpoint
from nmoe.runs.resumption import how_to_resume
from nmoe.runs.state import STATE, Part, snapshot_parts
from nmoe.runs.storage import bytes_free, make_directory, step_name, storage_errors

# What a checkpoint holds beside a model that others load.
_ONLY_TO_RESUME = shutil.ignore_patterns("optimizer.safetensors", "optimizer.json", STATE, MANIFEST)
# Where other processes write their parts.
_PARTS = ".parts_"


class Saver:
    """Saves a run's checkpoints, at most one at a time. The end of a `with` block waits for the one that is being written.

    By default a save copies the state to host memory and returns; a thread does the rest. Otherwise it returns when the checkpoint
    is written, and nothing is copied. `keep` is that of `save_checkpoint`. The weights of each checkpoint are also written to
    `exports`, where it is given: `exports/step_000010` with the links and the number of `directory`.
    """

    def __init__(self, directory: Path, keep: int, asynchronous: bool = True, exports: Path | None = None) -> None:
        """Raises UserError if the directory `exports` cannot be made."""
        self._directory, self._keep, self._asynchronous, self._exports = directory, keep, asynchronous, exports
        if exports is not None:
            with storage_errors(exports):
                make_directory(exports, "choose another checkpoint.export_directory")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, parts: Mapping[str, Part], best: bool = False) -> None:
        """Saves the parts as they are now, and then moves the link `latest`, and with `best` that one too. Waits for the save
        before, and raises its error.

        Raises UserError, with nothing written, if the disk has no room for it.
        """
        self.wait()
        snapshot = snapshot_parts(parts, copied=self._asynchronous)
        with storage_errors(self._directory):
            for left in self._directory.glob(f"{_PARTS}*"):  # of a save that was killed: they take room
                shutil.rmtree(left)
        refuse_without_room(self._directory, step, snapshot.size)
        with storage_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        snapshot.start(self._directory / f"{_PARTS}{step_name(step)}")
        if not self._asynchronous:
            self._write(step, snapshot, best)
            return
        # Not a daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=self._try, args=(step, snapshot, best), name=f"save {step_name(step)}")
        self._thread.start()

    def resume(self, checkpoint: Path, best: bool) -> None:
        """Finishes the save of a checkpoint that the run goes on from: it may have been killed before the checkpoint was marked as
        the best, or exported."""
        if best:
            mark_best(checkpoint)
        if self._exports is not None and not (self._exports / checkpoint.name).exists():
            self._export(checkpoint, self._exports, best)

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
        if self._exports is not None:
            self._export(saved, self._exports, best)

    def _export(self, checkpoint: Path, exports: Path, best: bool) -> None:
        def write(directory: Path) -> None:
            shutil.copytree(checkpoint, directory, ignore=_ONLY_TO_RESUME, dirs_exist_ok=True)

        exported = save_checkpoint(exports, checkpoint_step(checkpoint), write, self._keep)
        if best:
            mark_best(exported)


def refuse_without_room(directory: Path, step: int, size: int) -> None:
    """Raises UserError if the disk of `directory` has no room for a checkpoint with tensors of `size` bytes. It has
    to lie beside those that are there, which are removed only when it is whole."""
    newest = latest_checkpoint(directory)
    # Beside the tensors a checkpoint has small files, which the one before tells.
    before = 0 if newest is None else sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    needed, free = max(size, before), bytes_free(directory)
    if needed <= free:
        return
    left = ", and has no checkpoint yet" if newest is None else f"; its newest checkpoint, {newest.name}, is whole"
    raise UserError(
        f"{directory / step_name(step)}: not written, since a checkpoint takes {needed:,} bytes and {free:,} are free on its disk. "
        f"The run ends here{left}. Make room, lower checkpoint.keep, or move the run to another disk; it "
        f"goes on with {how_to_resume()}."
    )
