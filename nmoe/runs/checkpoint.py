"""A run's checkpoints: a thread writes them, and they are verified and found by step."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from nmoe.errors import UserError
from nmoe.model.snapshot import Snapshot
from nmoe.parsing import json_of
from nmoe.runs.state import STATE, Part, snapshot_parts
from nmoe.runs.storage import (
    bytes_free,
    how_to_resume,
    make_directory,
    sha256_of,
    step_name,
    step_of,
    storage_errors,
    sync,
)

MANIFEST = "manifest.json"
# Hidden names beside the checkpoints: one being written, one replaced by a save of the same step, one being removed.
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"


def save_checkpoint(directory: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Saves one checkpoint and returns its path, `directory/step_000010`.

    `write` fills an empty hidden directory; its files are flushed to disk and listed with size and SHA-256 in manifest.json before
    one rename gives it its name. Then the link `latest` moves to it, and all but the last `keep` checkpoints are removed, except
    those that `latest` and `best` name. A directory with the name of a checkpoint is whole even if the process is killed at any
    moment.

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
    """Returns the checkpoint of the highest step; None if there is none.

    The names decide, not the link `latest`: the process may be killed between writing the checkpoint and moving the link, and a
    user rolls a run back by removing its later checkpoints.
    """
    checkpoints = _checkpoints(directory)
    return checkpoints[-1] if checkpoints else None


def best_checkpoint(directory: Path) -> Path | None:
    """Returns the checkpoint that the link `best` points to; None if there is no such link, or its checkpoint was removed."""
    best = directory / "best"
    return best.resolve() if best.is_dir() else None


def checkpoint_step(path: Path) -> int:
    """Returns the step of a checkpoint; `path` may be the link `latest` or `best`. Raises UserError for other names."""
    step = step_of(path.resolve().name)
    if step is None:
        raise UserError(f"{path}: not a checkpoint; name a directory such as checkpoints/step_000010")
    return step


def verify_checkpoint(path: Path) -> None:
    """Compares every file of a checkpoint with its manifest. Raises UserError, naming the first that is missing, cut or altered.

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
    """Points the link `best` to a checkpoint, which is then kept until another is the best. Raises StorageError."""
    best = checkpoint.parent / "best"
    with storage_errors(best):
        _point(best, checkpoint)


def remove_leftovers(directory: Path) -> None:
    """Removes the files that a killed save left behind, and restores a checkpoint that it had moved aside."""
    for path in directory.glob(".step_*"):
        final = directory / path.stem.removeprefix(".")
        if path.suffix == _REPLACED and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path)
    for path in directory.glob(".*.link"):
        path.unlink()


def _seal(partial: Path, step: int) -> None:
    """Writes the manifest and flushes the whole directory to disk, so that the rename does not reach the disk before the
    content."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    entries = {
        file.relative_to(partial).as_posix(): {"size": file.stat().st_size, "sha256": sha256_of(file)} for file in files
    }
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": entries}, indent=1) + "\n")
    directories = [path for path in partial.rglob("*") if path.is_dir()]
    for path in [*files, manifest, *directories, partial]:
        sync(path)


def _give_name(partial: Path, final: Path) -> None:
    replaced = _hidden(final, _REPLACED)
    if final.exists():  # a directory cannot be renamed onto one that has files
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _point(link: Path, checkpoint: Path) -> None:
    """Points a link to a checkpoint atomically, so that it always names one. The link is relative, so that a run can be moved."""
    fresh = _hidden(link, ".link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(checkpoint.name)
    fresh.replace(link)
    sync(link.parent)


def _prune(directory: Path, keep: int) -> None:
    linked = {(directory / name).resolve() for name in ("latest", "best")}
    for checkpoint in _checkpoints(directory)[:-keep]:
        if checkpoint.resolve() not in linked:
            # Hidden first: a removal that is killed must not leave a part under the name of a checkpoint.
            shutil.rmtree(checkpoint.rename(_hidden(checkpoint, _REMOVED)))


def _checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints in the order of their steps."""
    if not directory.is_dir():
        return []
    steps = {step: path for path in directory.iterdir() if path.is_dir() and (step := step_of(path.name)) is not None}
    return [steps[step] for step in sorted(steps)]


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


# What a checkpoint holds beside a model that others load.
only_to_resume = shutil.ignore_patterns("optimizer.safetensors", "optimizer.json", STATE, MANIFEST)
# Where other processes write their parts.
_PARTS = ".parts_"


class Saver:
    """Saves a run's checkpoints, one at a time. The end of a `with` block waits until the last one is written.

    By default a save copies the state to host memory and returns; a thread writes it. If not `asynchronous`, nothing is copied, and
    `save` returns when the checkpoint is written. `keep` is as in `save_checkpoint`. If `exports` is given, the weights of each
    checkpoint are also written there, as `exports/step_000010`, with the same links and number of checkpoints.
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
        """Saves the parts in their present state, and then moves the link `latest`, and with `best` also the link `best`. First
        waits for the previous save, and raises its error.

        Raises UserError, with nothing written, if the disk has no room for the checkpoint.
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

    def resume(self, checkpoint: Path, best: int | None) -> None:
        """Completes the checkpoint that a run resumes from, since its save may have been killed early. Exports it and the best one,
        unless that was done, and points `latest` and `best` to them, in the exports as well.

        `best` is the step of the best evaluation so far. The link stays as it is without one, or if its checkpoint was removed.
        """
        named = {"latest": checkpoint}
        if best is not None and (one := self._directory / step_name(best)).is_dir():
            named = {"best": one} | named  # first, so that the export of the other does not remove it
        for link, one in named.items():
            with storage_errors(self._directory):
                _point(self._directory / link, one)
            if self._exports is not None:
                if not (self._exports / one.name).exists():
                    self._export(one, self._exports, best=False)
                with storage_errors(self._exports):
                    _point(self._exports / link, one)

    def check(self) -> None:
        """Raises the error of a save that has failed in its thread. Returns at once."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits until the save in progress is written. Raises its error if it failed."""
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
            shutil.copytree(checkpoint, directory, ignore=only_to_resume, dirs_exist_ok=True)

        exported = save_checkpoint(exports, checkpoint_step(checkpoint), write, self._keep)
        if best:
            mark_best(exported)


def refuse_without_room(directory: Path, step: int, size: int) -> None:
    """Raises UserError if the disk of `directory` has no room for a checkpoint with tensors of `size` bytes, in addition to the
    present ones, which are removed only when the new one is whole."""
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
