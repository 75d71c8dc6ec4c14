"""The disk as a kill leaves it, copied from beneath a process that lives on."""

from __future__ import annotations

import shutil
from pathlib import Path


def left_by_a_kill(root: Path, target: Path) -> Path:
    """Copies a directory in which threads still remove files: one that vanishes before it is read was removed before the kill."""
    try:
        shutil.copytree(root, target, ignore=shutil.ignore_patterns("*-shm"))
    except shutil.Error as error:
        for source, _, reason in error.args[0]:
            if Path(source).exists():
                raise OSError(f"{source} was not copied: {reason}") from error
    return target
