"""Where workspaces lie, and what tells one from anything else there: a marker that is also its provenance, and a lock."""

from __future__ import annotations

import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path

MARKER = "nmoe-workspace.json"
LOCK = ".lock"
MAKING = ".making-"


def workspaces_root() -> Path:
    """Where workspaces lie: $NMOE_WORKSPACES, else nmoe/workspaces in the user's cache directory."""
    named = os.environ.get("NMOE_WORKSPACES")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else cache / "nmoe" / "workspaces"


def lock(directory: Path, kind: int) -> int:
    """Locks a workspace against others of another kind, until the descriptor that is returned is closed."""
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
