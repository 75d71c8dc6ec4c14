"""What glibc does with the memory that a run frees: it keeps it, and gives back the gaps where they grow large."""

from __future__ import annotations

import ctypes
import gc
import platform
import resource
from pathlib import Path
from typing import ClassVar


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for later allocations rather than return it to the system.

    A training step frees and allocates buffers of many megabytes, and the kernel clears every page of a new one.
    Without this setting, that took half of the system time of a step (0.9 of 7 s in all). Other C libraries are left as
    they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_mmap_threshold = -1, -3  # from malloc.h
    mallopt(m_mmap_threshold, 2**30)
    mallopt(m_trim_threshold, 2**31 - 1)


def return_freed_memory() -> None:
    """Gives the system back the freed memory that glibc has kept (`keep_freed_memory`). Does nothing under other C libraries."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


# Gaps that are worth the time in which the kernel clears their pages again.
_LEAST_GAPS = 2**30


class _Allocated(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def return_gaps() -> None:
    """Gives the system back the memory between allocated blocks, where that exceeds 1 GiB and a quarter of the allocated bytes.

    Experts have another number of rows in every micro-batch, so that no activation fits where another one was: a mixture of
    373M weights held 10.9 GB in its second step, of which 3.2 GB were gaps. Does nothing under C libraries without mallinfo2.
    """
    c = ctypes.CDLL(None)
    if platform.libc_ver()[0] != "glibc" or not hasattr(c, "mallinfo2"):
        return
    c.mallinfo2.restype = _Allocated
    found = c.mallinfo2()
    allocated = found.uordblks + found.hblkhd
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    if resident - allocated > max(_LEAST_GAPS, allocated / 4):
        c.malloc_trim(0)
