"""The store of workspaces: its directory, the marker and lock of each workspace, and garbage collection."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from nmoe.parsing import json_of

MARKER = "nmoe-workspace.json"
LOCK = ".lock"
MAKING = ".making-"


def workspaces_root() -> Path:
    """Returns the directory of workspaces: $NMOE_WORKSPACES, else nmoe/workspaces in the user's cache directory."""
    named = os.environ.get("NMOE_WORKSPACES")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else cache / "nmoe" / "workspaces"


def lock(directory: Path, kind: int) -> int:
    """Locks a workspace, shared or exclusive (`kind` as in flock), until the returned descriptor is closed. With LOCK_NB raises
    BlockingIOError if it is held."""
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


def collect(root: Path, *, dry_run: bool, now: float | None = None) -> Iterator[str]:
    """Removes the workspaces below `root` that are unfinished, expired, or beyond their environment's quota (least recently used
    first).

    Yields a line for each of these, also for those in use, which stay, for each other entry without a workspace's marker, which is
    never touched, and last for all together. With `dry_run` nothing is removed.
    """
    now = time.time() if now is None else now
    found, strangers = _survey(root)
    kept_mb: dict[str, float] = {}
    removed = 0.0
    # Most recently used first, so that each environment's quota keeps its newest.
    for one in sorted(found, key=lambda one: -one.used):
        why = one.why_past(now, kept_mb.get(one.env_id, 0.0))
        if why is not None and not one.is_free():
            yield f"in use        {one.path.name}: {one.mb:.1f} MB, {why}"
            why = None
        elif why is not None:
            if not dry_run:
                shutil.rmtree(
                    one.path / "tree", ignore_errors=True
                )  # the marker goes last, so that a half-removed workspace is still recognised
                shutil.rmtree(one.path)
            removed += one.mb
            yield f"{'would remove ' if dry_run else 'removed      '} {one.path.name}: {one.mb:.1f} MB, {why}"
        if why is None:
            kept_mb[one.env_id] = kept_mb.get(one.env_id, 0.0) + one.mb
    for path in strangers:
        yield f"left alone    {path.name}: no {MARKER} in it, so nmoe did not make it"
    yield f"{root}: {'would free' if dry_run else 'freed'} {removed:.1f} MB, {sum(kept_mb.values()):.1f} MB stay"


@dataclass(frozen=True)
class _Found:
    """A workspace on disk. `used` is the time of its last use, in seconds since the epoch."""

    path: Path
    env_id: str
    used: float
    mb: float
    max_age_days: float
    max_disk_mb: float

    def why_past(self, now: float, newer_mb: float) -> str | None:
        days = (now - self.used) / 86400
        if self.path.name.startswith(MAKING):
            return "never finished"
        if days > self.max_age_days:
            return f"last used {days:.1f} days ago, more than max_age_days = {self.max_age_days:g}"
        if newer_mb + self.mb > self.max_disk_mb:
            return f"beyond max_disk_mb = {self.max_disk_mb:g} of environment {self.env_id!r}"
        return None

    def is_free(self) -> bool:
        try:
            os.close(lock(self.path, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True


def _survey(root: Path) -> tuple[list[_Found], list[Path]]:
    """Returns the workspaces below `root`, and the paths of all other entries."""
    found, strangers = [], []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        one = None if path.is_symlink() else _read_marker(path)
        if one is None:
            strangers.append(path)
        else:
            found.append(one)
    return found, strangers


def _read_marker(path: Path) -> _Found | None:
    marker = path / MARKER
    try:
        if not stat.S_ISREG(marker.lstat().st_mode):
            return None
        record = json_of(marker.read_text())
        if record["nmoe_workspace"] != 1:
            return None
        policy = record["policy"]
        size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir() or file.is_symlink())
        used = marker.lstat().st_mtime
        limits = float(policy["max_age_days"]), float(policy["max_disk_mb"])
        return _Found(path, str(record["env_id"]), used, size / 2**20, *limits)
    except (OSError, ValueError, KeyError, TypeError):
        return None
