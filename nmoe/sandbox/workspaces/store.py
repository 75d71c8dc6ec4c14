"""Where workspaces lie, and what identifies one there: a marker with its provenance, and a lock."""

from __future__ import annotations

import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path

MARKER = "nmoe-workspace.json"
LOCK = ".lock"
MAKING = ".making-"


def workspaces_root() -> Path:
    """The directory of workspaces: $NMOE_WORKSPACES, else nmoe/workspaces in the user's cache directory."""
    named = os.environ.get("NMOE_WORKSPACES")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else cache / "nmoe" / "workspaces"


def lock(directory: Path, kind: int) -> int:
    """Locks a workspace against locks of the other kind, until the returned descriptor is closed."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def now_utc() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
