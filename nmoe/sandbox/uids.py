"""Unprivileged uids for sandboxes: if uids are available, each live sandbox has one that nothing else on the machine uses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from nmoe.sandbox.api import SandboxSetupError

_UIDS = 65536


def has_uids(first: int) -> bool:
    """Whether this process may switch to other uids, which only root may.

    Raises SandboxSetupError for root of a user namespace that does not map the uids from `first` on.
    """
    if os.getuid() != 0:
        return False
    known = {kind: _known(kind) for kind in ("uid", "gid")}
    if all(first in ids for ids in known.values()):
        return True
    said = " and ".join(f"{kind}s {ids.start} to {ids.stop - 1}" for kind, ids in known.items())
    remedy = "start it as an ordinary user instead, without `unshare -r`"
    if all(len(ids) > 1 for ids in known.values()):
        remedy = f"name some of those, such as [sandbox] first_uid = {max(ids.start + len(ids) // 2 for ids in known.values())}"
    raise SandboxSetupError(
        f"sandbox_setup_failed: nmoe runs as root of a user namespace that knows {said} alone, and gives sandboxes the uids from "
        f"sandbox.first_uid = {first} on; {remedy}"
    )


def free_uid(first: int) -> tuple[int, socket.socket]:
    """Reserves a uid from `first` on that no live sandbox on this machine has.

    The lock is an abstract socket's name, which is released when its process ends. Raises SandboxSetupError if no uid is free.
    """
    count = min(_UIDS, *(_known(kind).stop - first for kind in ("uid", "gid")))
    for uid in _round_from(first, count, os.getpid()):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0nmoe-sandbox-uid-{uid}")
        except OSError:
            lock.close()
        else:
            return uid, lock
    raise SandboxSetupError(f"sandbox_setup_failed: all {count} uids from {first} on are in use")


def _known(kind: str) -> range:
    """The largest range of ids that this user namespace maps."""
    with open(f"/proc/self/{kind}_map") as file:
        rows = [[int(field) for field in line.split()] for line in file]
    return max((range(inside, inside + count) for inside, _, count in rows), key=len, default=range(0))


def _round_from(first: int, count: int, offset: int) -> Iterator[int]:
    # Starts at a place that depends on the process, so that the first try is usually free.
    for index in range(count):
        yield first + (offset * 61 + index) % count
