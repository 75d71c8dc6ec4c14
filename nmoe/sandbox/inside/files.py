"""Reads and writes workspace files in a child process: never outside the workspace, through a link, or a fifo or device."""

from __future__ import annotations

import errno
import os
import stat

from nmoe.sandbox.inside.child import state
from nmoe.sandbox.inside.kernel import open_beneath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def read(workspace: str, path: str) -> Callable[[], None]:
    """Returns an action that writes a regular file's content to standard output."""

    def act() -> None:
        descriptor = _open(workspace, path, os.O_RDONLY | os.O_NONBLOCK)
        while data := os.read(descriptor, 1 << 16):
            os.write(1, data)

    return act


def read_lines(workspace: str, path: str, first: int, count: int) -> Callable[[], None]:
    """Returns an action that writes `count` lines of a regular file from line `first`, counted from 1, to standard output,
    unchanged.

    Ends as "tool_error" if a non-empty file has no line `first`. Holds one block in memory, however long the lines are.
    """

    def act() -> None:
        descriptor = _open(workspace, path, os.O_RDONLY | os.O_NONBLOCK)
        line, wanted = 1, range(first, first + count)
        ended = True  # whether the text read so far ends with a newline
        while line < wanted.stop and (block := os.read(descriptor, 1 << 16)):
            start = 0
            while start < len(block) and line < wanted.stop:
                # Lines before the first are counted block by block, wanted ones one by one.
                if line < first and line + (newlines := block.count(b"\n", start)) < first:
                    line, start, ended = line + newlines, len(block), block.endswith(b"\n")
                    continue
                end = block.find(b"\n", start) + 1
                ended = end > 0
                stop = end or len(block)
                if line in wanted:
                    _write_all(1, block[start:stop])
                line, start = line + ended, stop
        lines = line - ended
        if 0 < lines < first:
            _end("tool_error", f"{path} has {lines} lines, none from {first} on")

    return act


def edit(workspace: str, path: str, old: bytes, new: bytes) -> Callable[[], None]:
    """Returns an action that replaces the only occurrence of `old` in a regular file, and ends as "tool_error" if there is none, or
    more than one."""

    def act() -> None:
        descriptor = _open(workspace, path, os.O_RDWR | os.O_NONBLOCK, only_name=True)
        content = b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))
        count = content.count(old)
        if count != 1:
            _end("tool_error", f"the text stands {count} times in {path}, not once")
        offset = content.index(old)
        os.lseek(descriptor, offset, os.SEEK_SET)
        _write_all(descriptor, new + content[offset + len(old) :])
        os.ftruncate(descriptor, len(content) - len(old) + len(new))

    return act


def write(workspace: str, path: str, data: bytes) -> Callable[[], None]:
    """Returns an action that replaces a file, or creates it and its parent directories."""

    def act() -> None:
        relative = _relative(workspace, path)
        _make_directories(workspace, os.path.dirname(relative))
        # Not truncated before it is known to be a regular file with one name: another name may lie in a protected directory.
        descriptor = _open(workspace, path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, only_name=True)
        os.ftruncate(descriptor, 0)
        _write_all(descriptor, data)

    return act


def put(workspace: str, entries: Sequence[tuple[str, str, int]], blobs: Sequence[bytes]) -> Callable[[], None]:
    """Returns an action that creates entries (path, "directory" | "file" | "link", mode) with the contents `blobs`, replacing
    existing ones."""

    def act() -> None:
        root = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY)
        for (path, kind, mode), blob in zip(entries, blobs, strict=True):
            *above, name = path.split("/")
            directory = os.dup(root)
            for part in above:
                directory = _directory_in(directory, part)
            if kind == "directory":
                os.fchmod(_directory_in(directory, name), mode | 0o700)
                continue
            _remove(directory, name)
            if kind == "link":
                os.symlink(blob, name, dir_fd=directory)
            else:
                descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=directory)
                _write_all(descriptor, blob)
                os.fchmod(descriptor, mode | 0o600)
                os.close(descriptor)
            os.close(directory)

    return act


def _relative(workspace: str, path: str) -> str:
    if "\0" in path:
        _end("tool_error", "a path has no null byte")
    return os.path.relpath(path, workspace) if os.path.isabs(path) else path


def _open(workspace: str, path: str, flags: int, *, only_name: bool = False) -> int:
    """Opens a regular file below the workspace and returns its descriptor; ends this child if it is anything else."""
    root = os.open(workspace, os.O_PATH | os.O_DIRECTORY)
    try:
        descriptor = open_beneath(root, _relative(workspace, path), flags, 0o644 if flags & os.O_CREAT else 0)
    except OSError as error:
        _refuse(path, error)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        _end("sandbox_denied", f"{path}: no regular file")
    if only_name and found.st_nlink > 1:
        _end("sandbox_denied", f"{path}: has another name too, as a hard link")
    return descriptor


def _refuse(path: str, error: OSError) -> None:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        _end("tool_error", f"{path}: no such file")
    if error.errno in (errno.EXDEV, errno.ELOOP):
        _end("sandbox_denied", f"{path}: leaves the workspace or goes through a link")
    if error.errno in (errno.EISDIR, errno.ENXIO):
        _end("sandbox_denied", f"{path}: no regular file")
    raise error


def _end(failure: str, message: str) -> None:
    state(failure)
    os.write(2, message.encode())
    os._exit(1)


def _make_directories(workspace: str, path: str) -> None:
    directory = os.open(workspace, os.O_PATH | os.O_DIRECTORY)
    done = ""
    for part in filter(None, path.split("/")):
        done = f"{done}{part}/"
        try:
            following = open_beneath(directory, done, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            above = open_beneath(directory, os.path.dirname(done.rstrip("/")) or ".", os.O_PATH | os.O_DIRECTORY)
            os.mkdir(part, dir_fd=above)
            os.close(above)
        except OSError as error:
            _refuse(path, error)
        else:
            os.close(following)


def _directory_in(directory: int, name: str) -> int:
    """Opens the directory `name` in `directory`, creating it, if need be in place of another kind of entry. Closes `directory`."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        found = os.open(name, flags, dir_fd=directory)
    except OSError:
        _remove(directory, name)
        os.mkdir(name, dir_fd=directory)
        found = os.open(name, flags, dir_fd=directory)
    os.close(directory)
    return found


def _remove(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
        os.fchmod(inner, 0o700)
        for one in os.listdir(inner):
            _remove(inner, one)
        os.close(inner)
        os.rmdir(name, dir_fd=directory)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
