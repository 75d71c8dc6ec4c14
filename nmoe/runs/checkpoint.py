"""Checkpoints: directories that appear under their name only when they are whole, with a manifest to verify them later."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.runs.storage import step_name, step_of, storage_errors

MANIFEST = "manifest.json"
# Hidden names beside the checkpoints: one being written, one replaced by a save of the same step, one being removed.
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"


def save_checkpoint(directory: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Saves one checkpoint and returns its path, `directory/step_000010`.

    `write` fills an empty hidden directory; its files are flushed to disk and listed with size and SHA-256 in
    manifest.json before one rename gives it its name. Then the link `latest` moves to it, and all but the last `keep`
    checkpoints are removed, except those that `latest` and `best` name. A directory with the name of a checkpoint is whole
    even if the process is killed at any moment.

    Raises StorageError if the disk is full or cannot be written, whatever error `write` raised for it. Any other error of
    `write` passes unchanged. The unfinished directory is removed in both cases.
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
        if _sha256(file) != sha256:
            raise UserError(f"{file}: its content is not what was saved (SHA-256 differs); {remedy}")


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
        file.relative_to(partial).as_posix(): {"size": file.stat().st_size, "sha256": _sha256(file)} for file in files
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


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
