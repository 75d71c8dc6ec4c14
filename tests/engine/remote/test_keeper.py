"""Servers end with the process that started them, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from nmoe.engine.remote import keeper

# Starts a command under the keeper, which starts a process of its own, and writes the ids of both.
PARENT = f"""
import subprocess, sys, time
command = [sys.executable, "-S", "-E", {keeper.__file__!r}, sys.executable, "-c", sys.argv[1], sys.argv[2]]
subprocess.Popen(command, stdin=subprocess.PIPE)
time.sleep(60)
"""
SERVER = """
import os, subprocess, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return "\\nState:\\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def until(holds: object, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def test_a_server_and_its_own_processes_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    server = SERVER.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, server, str(ids)])
    assert until(ids.exists)
    pids = list(map(int, ids.read_text().split()))
    assert all(map(alive, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert until(lambda: not any(map(alive, pids)))


def test_a_server_ends_with_a_keeper_that_was_killed(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    command = [sys.executable, "-S", "-E", keeper.__file__, sys.executable, "-c", SERVER, str(ids)]
    kept = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert until(ids.exists)
    server, own = map(int, ids.read_text().split())
    kept.kill()
    assert until(lambda: not alive(server))
    os.kill(own, signal.SIGKILL)


def test_the_keeper_ends_with_its_command_and_passes_its_exit_code_on(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-E", keeper.__file__, sys.executable, "-c", "raise SystemExit(7)"]
    kept = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert kept.wait(20) == 7
    kept = subprocess.Popen(
        [*command[:-1], "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], stdin=subprocess.PIPE
    )
    assert kept.wait(20) == 128 + signal.SIGKILL
