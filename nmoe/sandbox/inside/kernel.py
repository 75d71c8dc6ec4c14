"""System calls that Python does not provide, by ctypes. Each raises OSError with the name of the failed call."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from contextlib import suppress

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
MSG_CMSG_CLOEXEC = 0x40000000
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x02, 0x04, 0x08

_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x1, 0x2, 0x4
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
# Numbers from 424 on are the same on every architecture.
_MOUNT_SETATTR, _OPENAT2 = 442, 437
_PIVOT_ROOT, _CAPSET = (155, 126) if os.uname().machine == "x86_64" else (41, 91)
# openat2 gives up a path with `..` where anything on the machine was renamed or mounted meanwhile, and asks to be called again
# (openat2(2), EAGAIN).
_OPENINGS = 100

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(what: str, number: int, *arguments: int | bytes | None) -> int:
    """Makes a system call by its number. Integers are passed by value, bytes as a pointer."""
    values = [ctypes.c_long(one) if isinstance(one, int) else ctypes.c_char_p(one) for one in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *values))
    return _checked(result, what)


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(one) for one in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *padded), f"prctl {option}")


def set_seccomp_filter(program: bytes) -> None:
    """Installs a classic BPF program as the seccomp filter of this process and its descendants."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(header, len(header))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(buffer))


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare {flags:#x}")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {kind or source} on {target}")


def bind(source: str, target: str) -> None:
    mount(source, target, None, MS_BIND | MS_REC)


def restrict_mount(target: str, *, read_only: bool = True, recursive: bool = True) -> None:
    """Forbids set-user-id programs and device files in the mount at `target`, and writing if `read_only`; with `recursive` also in
    all mounts below it."""
    attributes = struct.pack("QQQQ", _ATTR_NOSUID | _ATTR_NODEV | (_ATTR_RDONLY if read_only else 0), 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    syscall(f"mount_setattr {target}", _MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, attributes, 32)


def pivot_root(new_root: str) -> None:
    """Makes `new_root` the root of this mount namespace, and detaches the old root."""
    os.chdir(new_root)
    syscall(f"pivot_root {new_root}", _PIVOT_ROOT, b".", b".")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        prctl(PR_CAPBSET_DROP, capability)
    syscall("capset", _CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24))


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Opens a path by openat2 that cannot leave `directory` and follows no symbolic link; returns the descriptor."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
    for _ in range(_OPENINGS):
        with suppress(BlockingIOError):
            return syscall(f"open {path}", _OPENAT2, directory, path.encode(), how, len(how))
    raise OSError(errno.EXDEV, f"open {path}: files are renamed all the time, so that the kernel trusts no ..")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
