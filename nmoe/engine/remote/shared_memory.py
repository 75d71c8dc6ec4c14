"""Directories of weights in the memory of a machine, where the learner and the servers see them without a disk between."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

# Memory that looks like a directory.
_SHARED_MEMORY = Path("/dev/shm")
# The process whose directory it is: its number, its start in clock ticks, and the namespace of both, as containers may share the
# memory but not the numbers.
_NAME = re.compile(r"nmoe_weights_(\d+)_(\d+)_(\d+)_")


def new_directory(size: int, shared: Path | None) -> Path:
    """Makes a directory for so many bytes of weights below `shared`; None takes this machine's memory where it has the room, and
    else the directory of temporary files."""
    if shared is None and _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size:
        shared = _SHARED_MEMORY
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"nmoe_weights_{pid}_{_began(pid)}_{_namespace()}_", dir=shared))


def remove_left() -> None:
    """Removes from this machine's memory the weights of killed processes of this user."""
    for directory in _SHARED_MEMORY.glob("nmoe_weights_*"):
        if (named := _NAME.match(directory.name)) is None or int(named[3]) != _namespace():
            continue
        pid, began = int(named[1]), int(named[2])
        try:
            ours = directory.stat().st_uid == os.getuid()
        except FileNotFoundError:
            continue
        if ours and _began(pid) != began:
            shutil.rmtree(directory, ignore_errors=True)


def _began(pid: int) -> int:
    """Returns when a process began, in clock ticks since the machine did; 0 if it does not run."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(said.rpartition(")")[2].split()[19])  # its name, in parentheses, may hold anything


def _namespace() -> int:
    """Returns the number of the namespace that this process's number is from; 0 on a machine without any."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except FileNotFoundError:
        return 0
