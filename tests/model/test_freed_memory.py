"""Memory between allocated blocks is given back where there is much of it, and only there."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, whose allocator keeps what is freed. 400 blocks of 1 MB, of which every second one is freed.
SCRIPT = """
import ctypes, sys
from pathlib import Path
from nmoe.model import device
device.keep_freed_memory()
device._LEAST_GAPS = int(sys.argv[1]) * 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
blocks = []
for _ in range(400):
    block = libc.malloc(2**20)
    ctypes.memset(block, 1, 2**20)
    blocks.append(block)
for block in blocks[::2]:
    libc.free(block)
held = resident()
device.return_gaps()
print(held - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="gaps are glibc's")
@pytest.mark.parametrize(("least_mb", "low", "high"), [(64, 180, 220), (100_000, -5, 5)])
def test_gaps_are_returned_where_they_are_large(least_mb: int, low: int, high: int) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(least_mb)], cwd=root, capture_output=True, text=True, check=True
    )
    assert low <= int(done.stdout) <= high
