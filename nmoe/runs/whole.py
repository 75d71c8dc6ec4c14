"""A directory that appears under its name when it is whole: the output of an import, an export, or any other new checkpoint."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nmoe.errors import UserError
from nmoe.runs.storage import make_directory, resumed_by, storage_errors

_LOCK = ".lock"


@contextmanager
def whole_directory(out: Path, remedy: str) -> Iterator[Path]:
    """Gives an empty directory beside `out` to write to, and renames it to `out` at the end of the block. If the block raises,
    nothing stays of it, nor of the directories above that were made for it. What a killed process left is removed by the next one.

    `remedy` ends messages, such as "name another directory with --out". Raises UserError where another process writes `out`,
    where it is there and not an empty directory, and where no directory can be made; StorageError for a disk that is full or
    read-only.
    """
    # A link to a directory that is empty or is yet to be made stands for that directory.
    place = Path(os.path.realpath(out)) if out.is_symlink() else Path(os.path.abspath(out))
    partial = place.with_name(f".{place.name}.partial")
    made = [parent for parent in place.parents if not parent.exists()]
    with resumed_by(""), storage_errors(out):
        try:
            lock = _locked(partial, out, remedy)
            try:
                # Only now: another process may have finished it in the meantime.
                _refuse_taken(place, out, remedy)
                _clear(partial)
                yield partial
                _refuse_taken(place, out, remedy)
                partial.replace(place)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            finally:
                os.close(lock)
            (place / _LOCK).unlink(missing_ok=True)
        except BaseException:
            for parent in made:
                with suppress(OSError):  # something else lies there by now
                    parent.rmdir()
            raise


def _locked(partial: Path, out: Path, remedy: str) -> int:
    """Makes the directory, and locks a file in it until the returned descriptor is closed, also by `kill -9`."""
    while True:
        try:
            make_directory(partial, remedy)
        except UserError:
            raise UserError(f"{out}: no directory can be made there; {remedy}") from None
        with suppress(FileNotFoundError):  # the holder renamed or removed it between two lines
            lock = os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(partial / _LOCK)):
                    return lock
            except BlockingIOError:
                os.close(lock)
                raise UserError(f"{out}: another process is writing it; wait for it to end, or {remedy}") from None
            except FileNotFoundError:
                pass
            os.close(lock)


def _clear(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.name != _LOCK:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _refuse_taken(place: Path, out: Path, remedy: str) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"{out}: exists and is not an empty directory; {remedy}")
