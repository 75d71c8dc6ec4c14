"""Landlock: lets a process give up file rights, for itself and its descendants (Linux 5.13; landlock(7))."""

from __future__ import annotations

import os
import struct

from nmoe.sandbox.inside import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
# The number of file rights in each version of the interface.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}

LIST = _READ_DIR
READ = _EXECUTE | _READ_FILE | _READ_DIR
DEVICE = _READ_FILE | _WRITE_FILE
# No rule ever grants making device nodes or controlling devices.
WRITE = READ | ((1 << 15) - 1 & ~_MAKE_CHAR & ~_MAKE_BLOCK)


def version() -> int:
    """Returns the version of the kernel's Landlock interface; 0 if it is missing or disabled."""
    try:
        return kernel.syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def ruleset(rules: Sequence[tuple[str, int]], *, network: bool = False) -> int:
    """Creates a Landlock ruleset, which lists the only rights to keep: (path, READ | WRITE | DEVICE), each for everything beneath
    the path. Returns its descriptor.

    A path that does not exist has no rule. `network` also gives up TCP, abstract sockets and signals to outside processes, as far
    as the kernel supports it. Raises OSError if the kernel has no Landlock.
    """
    known = version()
    if not known:
        raise OSError("Landlock is not there: the kernel was built or booted without it")
    handled = (1 << _RIGHTS[min(known, 5)]) - 1
    attributes = struct.pack("QQQ", handled, 3 if network and known >= 4 else 0, 3 if network and known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
    made = kernel.syscall("landlock_create_ruleset", _CREATE_RULESET, attributes[:size], size, 0)
    for path, rights in rules:
        try:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
        rule = struct.pack("=Qi", rights & handled, beneath)
        kernel.syscall(f"landlock_add_rule {path}", _ADD_RULE, made, 1, rule, 0)
        os.close(beneath)
    return made


def restrict(made: int) -> None:
    """Applies a ruleset (`ruleset`) to this process and its descendants, for good."""
    kernel.syscall("landlock_restrict_self", _RESTRICT_SELF, made, 0)
