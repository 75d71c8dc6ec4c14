"""The checkpoints of a run: written by a thread, checked, and found."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from nmoe.errors import UserError
from nmoe.model.snapshot import Snapshot
from nmoe.parsing import json_of
from nmoe.runs.state import STATE, Part, snapshot_parts
from nmoe.runs.storage import bytes_free, how_to_resume, make_directory, sha256_of, step_name, step_of, storage_errors

MANIFEST = "manifest.json"
# Hidden names beside the checkpoints: one being written, one replaced by a save of the same step, one being removed.
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"


def save_checkpoint(directory: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Saves one checkpoint and returns its path, `directory/step_000010`.

    `write` fills an empty hidden directory; its files are flushed to disk and listed with size and SHA-256 in
    manifest.json before one rename gives it its name. Then the link `latest` moves to it, and all but the last `keep`
    checkpoints are removed, except those that `latest` and `best` name. A directory with the name of a checkpoint is whole
    even if the process is killed at any moment.

    Raises StorageError if the disk is full or cannot be written, in place of the error that `write` raised for it. Any other error
    of `write` passes unchanged. The unfinished directory is removed in both cases.
    """
    if keep < 1:
        raise ValueError(f"keep has to be at least 1, got {keep}")
    final = directory / step_name(step)
    partial = _hidden(final, _PARTIAL)
    with storage_errors(final):
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        partial.mkdir()
        try:
            with storage_errors(final):  # inside, so that the free bytes are measured before the leftovers are removed
                write(partial)
                _seal(partial, step)
            _give_name(partial, final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _point(directory / "latest", final)
        _prune(directory, keep)
    return final


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint of the highest step; None if there is none.

    The names decide, not the link `latest`: the process may be killed between the two, and a run is rolled back by
    removing its later checkpoints.
    """
    checkpoints = _checkpoints(directory)
    return checkpoints[-1] if checkpoints else None


def best_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that the link `best` leads to; None if there is no such link, or its checkpoint was removed."""
    best = directory / "best"
    return best.resolve() if best.is_dir() else None


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint; `path` may be the link `latest` or `best`. Raises UserError for other names."""
    step = step_of(path.resolve().name)
    if step is None:
        raise UserError(f"{path}: not a checkpoint; name a directory such as checkpoints/step_000010")
    return step


def verify_checkpoint(path: Path) -> None:
    """Compares every file with the manifest. Raises UserError, naming the first that is missing, cut or altered.

    Files that the manifest does not list are ignored.
    """
    manifest = path / MANIFEST
    remedy = "remove this checkpoint to go on from the one before"
    try:
        files = json_of(manifest.read_bytes())["files"]
        listed = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError as error:
        raise UserError(f"{manifest}: missing, so {path} is not a whole checkpoint; {remedy}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{manifest}: not a checkpoint's manifest; {remedy}") from error
    for name, (size, sha256) in listed.items():
        file = path / name
        if not file.is_file():
            raise UserError(f"{file}: missing, though {MANIFEST} lists it; {remedy}")
        if (found := file.stat().st_size) != size:
            raise UserError(f"{file}: has {found:,} bytes where {MANIFEST} lists {size:,}; {remedy}")
        if sha256_of(file) != sha256:
            raise UserError(f"{file}: its content is not the saved one (SHA-256 differs); {remedy}")


def mark_best(checkpoint: Path) -> None:
    """Points the link `best` to a checkpoint, which is then never removed. Raises StorageError."""
    best = checkpoint.parent / "best"
    with storage_errors(best):
        _point(best, checkpoint)


def remove_leftovers(directory: Path) -> None:
    """Removes the leftovers of a killed save, and restores a checkpoint that it had moved aside."""
    for path in directory.glob(".step_*"):
        final = directory / path.stem.removeprefix(".")
        if path.suffix == _REPLACED and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path)
    for path in directory.glob(".*.link"):
        path.unlink()


def _seal(partial: Path, step: int) -> None:
    """Writes the manifest and makes all of the directory durable, so that the rename does not reach the disk before the content."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    entries = {
        file.relative_to(partial).as_posix(): {"size": file.stat().st_size, "sha256": sha256_of(file)} for file in files
    }
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": entries}, indent=1) + "\n")
    directories = [path for path in partial.rglob("*") if path.is_dir()]
    for path in [*files, manifest, *directories, partial]:
        _sync(path)


def _give_name(partial: Path, final: Path) -> None:
    replaced = _hidden(final, _REPLACED)
    if final.exists():  # a directory cannot be renamed onto one that has files
        final.rename(replaced)
    partial.rename(final)
    _sync(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _point(link: Path, checkpoint: Path) -> None:
    """Points a link to a checkpoint in one step, so that it always names one. It is relative, so that a run can be moved."""
    fresh = _hidden(link, ".link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(checkpoint.name)
    fresh.replace(link)
    _sync(link.parent)


def _prune(directory: Path, keep: int) -> None:
    linked = {(directory / name).resolve() for name in ("latest", "best")}
    for checkpoint in _checkpoints(directory)[:-keep]:
        if checkpoint.resolve() not in linked:
            # Hidden first: a removal that is killed must not leave a part under the name of a checkpoint.
            shutil.rmtree(checkpoint.rename(_hidden(checkpoint, _REMOVED)))


def _checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in order of their step."""
    if not directory.is_dir():
        return []
    steps = {step: path for path in directory.iterdir() if path.is_dir() and (step := step_of(path.name)) is not None}
    return [steps[step] for step in sorted(steps)]


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What a checkpoint holds beside a model that others load.
_ONLY_TO_RESUME = shutil.ignore_patterns("optimizer.safetensors", "optimizer.json", STATE, MANIFEST)
# Where other processes write their parts.
_PARTS = ".parts_"


class Saver:
    """Saves a run's checkpoints, at most one at a time. The end of a `with` block waits for the one that is being written.

    By default a save copies the state to host memory and returns; a thread does the rest. Otherwise it returns when the checkpoint
    is written, and nothing is copied. `keep` is as in `save_checkpoint`. The weights of each checkpoint are also written to
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
            self._thread.join()  # its error is not raised: another one ends the run

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
    # Beside the tensors a checkpoint has small files, about as large as in the one before.
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
