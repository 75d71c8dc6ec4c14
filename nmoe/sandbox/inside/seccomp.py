"""The seccomp filter, a classic BPF program (seccomp(2)) that refuses dangerous system calls of sandboxed code.

Refused with EPERM are calls that reach other processes, other namespaces or the machine's settings, kernel interfaces with a
history of escapes, memory that counts in no process's size, and objects of which the whole machine or the host's user has a limited
number. Calls newer than this list are refused with ENOSYS.
"""

from __future__ import annotations

import errno
import os
import struct

# Numbers on x86_64 and aarch64, from the kernel's headers; None if there is no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "process_mrelease": (448, 448),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268), "statmount": (457, 457), "listmount": (458, 458),
    # kernel interfaces that have been used to escape from sandboxes
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "userfaultfd": (323, 282), "modify_ldt": (154, None), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "iopl": (172, None), "ioperm": (173, None), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116), "vhangup": (153, 58),
    "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None), "_sysctl": (156, None),
    # memory that counts in no process's size
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "mq_open": (240, 180), "mq_unlink": (241, 181),
    # A pipe holds the pages that it was given, of 2 MB each if they were huge, after they are unmapped.
    "vmsplice": (278, 75),
    # contexts of which the machine has 65,536 (fs.aio-max-nr), and watches of which the host's user has 128
    "io_setup": (206, 0), "io_destroy": (207, 1), "io_submit": (209, 2), "io_cancel": (210, 3), "io_getevents": (208, 4),
    "io_pgetevents": (333, 292), "inotify_init": (253, None), "inotify_init1": (294, 26),
    # lowering one's own CPU priority, which would look like starvation (nmoe.grading.code.verify)
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}  # fmt: skip

# (x86_64, aarch64) of calls that are harmful with some arguments, and of clone3, whose flags a filter cannot read.
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _SETSOCKOPT, _FCNTL, _IOCTL, _PERSONALITY, _PRLIMIT, _MMAP, _MADVISE = (
    (56, 220),
    (435, 435),
    (41, 198),
    (53, 199),
    (54, 208),
    (72, 25),
    (16, 29),
    (135, 92),
    (302, 261),
    (9, 222),
    (28, 233),
)
_NEWER_THAN_THIS_LIST = 463

_NEW_NAMESPACES = 0x7E020000
_AF_UNIX = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# Larger buffers hold memory that counts in no process's size.
_SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 7, 8, 32, 33
_F_SETPIPE_SZ = 1031
# Shared memory without a file keeps its pages when a process unmaps them; huge pages are taken from the host's own pool.
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
# Memory that is swapped out is no longer resident.
_MADV_PAGEOUT = 21

# seccomp_data: nr at 0, arch at 4, arguments from 16, eight bytes each, the low half first
_NR, _ARCH, _ARGUMENTS = 0, 4, 16
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def filter_program() -> bytes:
    """Returns the filter for this machine's architecture. Raises OSError on an unsupported one."""
    machine = os.uname().machine
    if machine not in _AUDIT_ARCH:
        raise OSError(f"the seccomp filter is written for {' and '.join(_AUDIT_ARCH)}, not for {machine}")
    column = list(_AUDIT_ARCH).index(machine)
    lines = [
        _line(_LOAD, _ARCH),
        *_unless(_EQUAL, _AUDIT_ARCH[machine], _KILL),
        _line(_LOAD, _NR),
        # On x86_64 this refuses x32 too, whose numbers start at 0x40000000.
        *_if(_GREATER_EQUAL, _NEWER_THAN_THIS_LIST, _ERROR | errno.ENOSYS),
        # The C library falls back to clone.
        *_if(_EQUAL, _CLONE3[column], _ERROR | errno.ENOSYS),
    ]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            lines += _if(_EQUAL, number, _ERROR | errno.EPERM)
    lines += _argument(_CLONE[column], 0, _if(_ANY_BIT, _NEW_NAMESPACES, _ERROR | errno.EPERM))
    for family_first in (_SOCKET, _SOCKETPAIR):
        lines += _argument(family_first[column], 0, _unless(_EQUAL, _AF_UNIX, _ERROR | errno.EPERM))
    sizes = (_SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE)
    refused = [line for size in sizes for line in _if(_EQUAL, size, _ERROR | errno.EPERM)]
    lines += _argument(_SETSOCKOPT[column], 2, refused)
    lines += _argument(_FCNTL[column], 1, _if(_EQUAL, _F_SETPIPE_SZ, _ERROR | errno.EPERM))
    lines += _argument(
        _IOCTL[column],
        1,
        [*_if(_EQUAL, _TIOCSTI, _ERROR | errno.EPERM), *_if(_EQUAL, _TIOCLINUX, _ERROR | errno.EPERM)],
    )
    # 0 is the ordinary personality, all ones asks for the current one.
    ordinary = [_line(_EQUAL, 0, 2, 0), _line(_EQUAL, 0xFFFFFFFF, 1, 0), _line(_RETURN, _ERROR | errno.EPERM)]
    lines += _argument(_PERSONALITY[column], 0, ordinary)
    shared = [_line(_ANY_BIT, _MAP_ANONYMOUS, 0, 2), *_if(_ANY_BIT, _MAP_SHARED, _ERROR | errno.EPERM)]
    lines += _argument(_MMAP[column], 3, [*_if(_ANY_BIT, _MAP_HUGETLB, _ERROR | errno.EPERM), *shared])
    lines += _argument(_MADVISE[column], 2, _if(_EQUAL, _MADV_PAGEOUT, _ERROR | errno.EPERM))
    # A process's own limits only: another process may be the agent.
    lines += _argument(_PRLIMIT[column], 0, _unless(_EQUAL, 0, _ERROR | errno.EPERM))
    lines.append(_line(_RETURN, _ALLOW))
    return b"".join(lines)


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _if(test: int, value: int, answer: int) -> list[bytes]:
    return [_line(test, value, 0, 1), _line(_RETURN, answer)]


def _unless(test: int, value: int, answer: int) -> list[bytes]:
    return [_line(test, value, 1, 0), _line(_RETURN, answer)]


def _argument(number: int, argument: int, checks: list[bytes]) -> list[bytes]:
    """Returns BPF code that applies `checks` to the low half of one argument of a system call, and allows the call if none of them
    refuses it."""
    body = [_line(_LOAD, _ARGUMENTS + 8 * argument), *checks, _line(_RETURN, _ALLOW)]
    return [_line(_EQUAL, number, 0, len(body)), *body]
