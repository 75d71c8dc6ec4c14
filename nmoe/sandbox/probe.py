"""Tests the protections of a sandbox before anything runs in one: each attempt to escape must fail, or the run does not start."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from nmoe.sandbox.api import Limits, Result, SandboxSetupError
from nmoe.sandbox.interpreter import Interpreter, beside
from nmoe.sandbox.process import ProcessSandbox

# Each attempt prints its name if it succeeds.
_ATTEMPTS = """
import ctypes, json, os, socket
target = json.loads({target!r})
def attempt(name, act):
    try:
        act()
    except (OSError, MemoryError):
        return
    print(name)
def connect(family, address):
    with socket.socket(family) as client:
        client.settimeout(1)
        client.connect(address)
def fill():
    with open("/tmp/fill", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (target["disk_mb"] + 1) << 20)
def processes():
    for _ in range(target["processes"] + 1):
        if os.fork() == 0:
            os.read(reader, 1)
            os._exit(0)
def trace():
    if ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0) < 0:
        raise OSError
def user():
    if os.getuid() == 0 or any("Cap" in line and int(line.split()[1], 16) for line in open("/proc/self/status")):
        return
    raise OSError
def beside():
    for directory, shown in target["beside"].items():
        if set(os.listdir(directory)) - set(shown):
            return
    raise OSError
reader, writer = os.pipe()
attempt("reading a file of the host", lambda: open(target["file"]).read())
attempt("seeing what lies beside the interpreter", beside)
attempt("reading the environment of its keeper", lambda: open("/proc/1/environ").read())
attempt("writing outside its workspace", lambda: open("/usr/escaped", "w"))
attempt("connecting to a TCP port of the host", lambda: connect(socket.AF_INET, ("127.0.0.1", target["port"])))
attempt("connecting to an abstract socket of the host", lambda: connect(socket.AF_UNIX, chr(0) + target["name"]))
attempt("tracing another process", trace)
attempt("a system call that the filter refuses", lambda: os.memfd_create("x"))
attempt("running as root or with capabilities", user)
attempt("filling more than its disk", fill)
attempt("starting more processes than allowed", processes)
"""

_HOARD = """
import time
hoard = [b"x" * (1 << 20) for _ in range(96)]
time.sleep(10)
"""


async def probe(
    start: Callable[[], Coroutine[Any, Any, ProcessSandbox]], limits: Limits, interpreter: Interpreter, level: str
) -> None:
    """Attempts to break out of, or to exceed the limits of, a sandbox that `start` opens, whose disk is as in `limits`. Raises
    SandboxSetupError, which names the attempts that succeeded."""
    name = f"nmoe-probe-{secrets.token_hex(8)}"
    with (
        tempfile.NamedTemporaryFile("w", prefix="nmoe-probe-") as file,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        file.write("secret")
        file.flush()
        os.chmod(file.name, 0o644)
        abstract.bind(f"\0{name}")
        abstract.listen()
        limits = replace(limits, wall_s=20.0, cpu_s=20.0, memory_mb=64, processes=8)
        limits = replace(limits, file_mb=limits.disk_mb + 2)
        target = {
            "file": file.name,
            "port": tcp.getsockname()[1],
            "name": name,
            "disk_mb": limits.disk_mb,
            "processes": limits.processes,
            "beside": beside(interpreter),
        }
        async with await start() as sandbox:
            attempts = await sandbox.python(_ATTEMPTS.format(target=json.dumps(target)), limits=limits)
            memory = await sandbox.python(_HOARD, limits=limits)
            late = await sandbox.bash("setsid sleep 60 & while :; do :; done", limits=replace(limits, wall_s=0.2))
    _check(level, attempts, memory, late)


def _check(level: str, attempts: Result, memory: Result, late: Result) -> None:
    through = attempts.stdout.decode(errors="replace").splitlines()
    if attempts.failure != "ok":
        through.append(
            f"the attempts themselves ended as {attempts.failure}: {attempts.stderr.decode(errors='replace')[-500:]}"
        )
    if memory.failure != "out_of_memory":
        through.append(f"using more memory than allowed ({memory.failure})")
    if late.failure != "timeout":
        through.append(f"running longer than allowed ({late.failure})")
    if through:
        raise SandboxSetupError(
            f"sandbox_setup_failed: a sandbox of level {level!r} does not hold on this machine; what got "
            f"through: {'; '.join(through)}"
        )
