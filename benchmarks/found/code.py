"""Checks of found faults: what sandboxed code can take, and how a solution's tests can be deceived."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from found import Result, check

_HOLDS = """
import ctypes, mmap
held = mmap.mmap(-1, 1 << 30)
for start in range(0, 1 << 30, 8 << 20):
    held[start : start + (8 << 20)] = b"x" * (8 << 20)
    place = ctypes.addressof(ctypes.c_char.from_buffer(held, start))
    ctypes.CDLL(None).madvise(ctypes.c_void_p(place), 8 << 20, mmap.MADV_DONTNEED)
print("holds 1 GB")
"""
_IGNORED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    if os.fork() == 0:
        while time.process_time() < 0.1: pass
        os._exit(0)
    try:
        while True: os.wait()
    except OSError: pass
"""
_AIO = "import ctypes; print(ctypes.CDLL(None).syscall(206, 100, ctypes.byref(ctypes.c_ulong(0))))"
_WEIGHT = "open('/proc/self/autogroup', 'w').write('5')"


def _sandboxes() -> Any:
    from nmoe.config.tables.sandbox import SandboxSettings
    from nmoe.sandbox.sandboxes import Sandboxes

    return Sandboxes(SandboxSettings(warm=0))


@check(
    12,
    "1 GB of unmapped shared memory under 128 MB; 4 CPU s of ignored children under 1; aio; autogroup; 2 CPU s of one process",
    "sandbox_denied, timeout, -1, sandbox_denied, timeout",
)
def limits_of_a_sandbox() -> Result:
    from nmoe.sandbox.api import Limits

    limits = Limits(wall_s=30.0, cpu_s=10.0, memory_mb=128)

    async def tried() -> list[str]:
        opened = _sandboxes()
        async with await opened.open() as sandbox:
            said = [
                (await sandbox.python(_HOLDS, limits=limits)).failure,
                (await sandbox.python(_IGNORED, limits=replace(limits, cpu_s=1.0))).failure,
                (await sandbox.python(_AIO, limits=limits)).stdout.decode().strip(),
                (await sandbox.python(_WEIGHT, limits=limits)).failure,
                (await sandbox.python("while True: pass", limits=replace(limits, cpu_s=2.0))).failure,
            ]
        await opened.close()
        return said

    said = asyncio.run(tried())
    return ", ".join(said), said == ["sandbox_denied", "timeout", "-1", "sandbox_denied", "timeout"]
