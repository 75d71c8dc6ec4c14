"""Reads a host directory as entries for a sandbox's workspace, without following links and within the sandbox's disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nmoe.errors import UserError
from nmoe.sandbox.process import Entry


def entries_of(directory: Path, most_mb: int) -> tuple[list[Entry], list[bytes]]:
    """Every directory, file and symbolic link below `directory`, parents first, with the file's content or the link's text.

    A link is copied as a link, even a dangling one. Raises UserError for an entry of another kind or one that cannot be read,
    and if the files are larger than `most_mb`.
    """
    entries: list[Entry] = []
    blobs: list[bytes] = []
    room = most_mb << 20

    def walk(above: str) -> None:
        nonlocal room
        with os.scandir(directory / above) as found:
            for one in sorted(found, key=lambda entry: entry.name):
                path = f"{above}{one.name}"
                status = one.stat(follow_symlinks=False)
                mode = stat.S_IMODE(status.st_mode) & 0o777
                if one.is_symlink():
                    entries.append((path, "link", mode))
                    blobs.append(os.fsencode(os.readlink(one.path)))
                elif one.is_dir(follow_symlinks=False):
                    entries.append((path, "directory", mode))
                    blobs.append(b"")
                    walk(f"{path}/")
                elif stat.S_ISREG(status.st_mode):
                    room -= status.st_size
                    if room < 0:
                        raise UserError(
                            f"workspace {directory}: its files have more than {most_mb} MB, the sandbox's disk; raise the "
                            "budget's disk or leave files out"
                        )
                    entries.append((path, "file", mode))
                    with open(one.path, "rb", opener=_not_a_link) as file:
                        blobs.append(file.read())
                else:
                    raise UserError(f"workspace {directory}: {path} is not a file, directory or link; remove it")

    try:
        walk("")
    except OSError as error:
        raise UserError(f"workspace {directory}: {error.filename}: {error.strerror}") from error
    return entries, blobs


def _not_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
