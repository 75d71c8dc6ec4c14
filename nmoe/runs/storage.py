"""Writes files and directories completely or not at all, names steps, and distinguishes a full disk from other errors."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from nmoe.errors import StorageError, UserError

_options = ["--run.resume=true"]


def how_to_resume() -> str:
    """Returns the option that resumes the present command's run: `--run.resume=true`; "" for a command without a run."""
    return _options[-1]


@contextmanager
def resumed_by(options: str) -> Iterator[None]:
    """Sets the option that `how_to_resume` returns within the `with` block, in every thread, for a command that starts runs itself;
    "" for a command without runs."""
    _options.append(options)
    try:
        yield
    finally:
        _options.pop()


_STORAGE_ERRNOS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
}
# Writers outside Python lose the errno and keep its text: safetensors says "I/O error: No space left on device (os
# error 28)", torch.save either "write(): fd 3 failed with No space left on device" or, from its zip writer, only that
# the stream stands at an unexpected position.
_STORAGE_TEXTS = (*(os.strerror(number) for number in sorted(_STORAGE_ERRNOS)), "inline_container", "iostream error")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Converts the errors of a full or unwritable disk, while `path` is written, into a StorageError with the free bytes.

    Any other error passes unchanged.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = _storage_reason(error)
        if reason is None:
            raise
        raise StorageError(
            f"{path}: cannot be written: {reason} ({bytes_free(path):,} bytes free on its disk). Make room or permit writing there"
            + (f"; a run goes on from its last checkpoint with {how_to_resume()}." if how_to_resume() else ".")
        ) from error


def make_directory(path: Path, remedy: str) -> None:
    """Creates a directory with its parents; it may exist. Raises UserError, with the remedy, if it cannot be one, and StorageError
    if the disk refuses it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    # A file system such as /proc takes none, and a file holds none.
    except (FileNotFoundError, FileExistsError, NotADirectoryError):
        raise UserError(f"{path}: no directory can be made there; {remedy}") from None
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}; make room or permit writing there, or {remedy}"
        ) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a whole file, or leaves the earlier one unchanged; a reader never sees a part.

    Raises StorageError if the disk is full or cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with storage_errors(path):
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def append_whole(path: Path, content: bytes) -> None:
    """Appends all of `content` to a file or, if the disk refuses a part of it, nothing.

    Nothing is buffered in this process, so that the content survives a `kill -9`. Raises StorageError.
    """
    with storage_errors(path), path.open("ab", buffering=0) as file:
        start = os.fstat(file.fileno()).st_size
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(start)
            raise


def sync(path: Path) -> None:
    """Forces a file, or a directory's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partials(directory: Path) -> None:
    """Removes the temporary files that a killed `write_atomically` left in a directory."""
    for partial in directory.glob(".*.partial"):
        partial.unlink()


def _storage_reason(error: BaseException) -> str | None:
    """Returns the reason if an error, or one that caused it, comes from a full or unwritable disk; None for other errors."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            if link.errno in _STORAGE_ERRNOS:
                return os.strerror(link.errno)
        elif any(text in str(link) for text in _STORAGE_TEXTS):
            return str(link)
        link = link.__cause__ or link.__context__
    return None


def bytes_free(path: Path) -> int:
    """Returns the free bytes on the disk of `path`, which need not exist."""
    while not os.path.exists(path):  # False, not an error, if a parent may not be searched
        path = path.parent
    return shutil.disk_usage(path).free


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_STEP_NAME = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    """Returns the name of a step, `step_000010`, at least six digits wide so that a directory listing sorts by step.

    Raises ValueError for a negative step.
    """
    if step < 0:
        raise ValueError(f"a step is counted from 0, got {step}")
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """Returns the step of a name such as `step_000010`; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


_LOCK = ".lock"


@contextmanager
def whole_directory(out: Path, remedy: str) -> Iterator[Path]:
    """Yields an empty directory next to `out` to write to, and renames it to `out` at the end of the `with` block. If the block
    raises, the directory is removed, with the parent directories that were made for it. Files that a killed process left are
    removed by the next one.

    `remedy` ends messages, such as "name another directory with --out". Raises UserError if another process is writing `out`, if
    `out` is anything but an empty directory, and if no directory can be made; StorageError for a disk that is full or read-only.
    """
    # A link to a directory that is empty or is yet to be made stands for that directory.
    target = Path(os.path.realpath(out)) if out.is_symlink() else Path(os.path.abspath(out))
    partial = target.with_name(f".{target.name}.partial")
    made = [parent for parent in target.parents if not parent.exists()]
    with resumed_by(""), storage_errors(out):
        try:
            lock = _locked(partial, out, remedy)
            try:
                # Only now: another process may have finished it in the meantime.
                _refuse_taken(target, out, remedy)
                _clear(partial)
                yield partial
                _refuse_taken(target, out, remedy)
                partial.replace(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            finally:
                os.close(lock)
            (target / _LOCK).unlink(missing_ok=True)
        except BaseException:
            for parent in made:
                with suppress(OSError):  # something else lies there by now
                    parent.rmdir()
            raise


def _locked(partial: Path, out: Path, remedy: str) -> int:
    """Creates the directory, and locks a file in it until the returned descriptor is closed or the process ends, even by `kill
    -9`."""
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


def _refuse_taken(target: Path, out: Path, remedy: str) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{out}: exists and is not an empty directory; {remedy}")
