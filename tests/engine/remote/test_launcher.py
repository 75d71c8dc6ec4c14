"""Processes of this machine, as a launcher starts, asks, ends and kills them."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from nmoe.engine.remote.launcher import Command, LocalLauncher, LocalProcess

# Says its arguments and a variable, starts a process of its own, and ends with 7 when it is asked to, if it `listens`.
PROGRAM = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "listens":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(sys.argv[1], os.environ["GIVEN"], own.pid, flush=True)
time.sleep(60)
"""


def started(launcher: LocalLauncher, how: str, at: str = "") -> tuple[LocalProcess, list[str]]:
    command = Command([sys.executable, "-c", PROGRAM, "{host}:{port}", how], {"GIVEN": "seen"})
    process = launcher.start("one", command, 0.0, at)
    until = time.monotonic() + 20
    while not (said := process.log.read_text()[process.began :]).endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.02)
    return process, said.split()


def gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_process_is_asked_and_started_again_where_it_was(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "logs")
    first, (address, given, own) = started(launcher, "listens")
    assert (address, given, first.code()) == (first.address, "seen", None)
    assert first.log == tmp_path / "logs/one.log"
    assert first.log.stat().st_mode & 0o077 == 0, "SGLang writes its key into it"
    first.ask()
    assert gone(int(own))
    until = time.monotonic() + 20
    while first.code() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert first.code() == 7
    first.end()
    second, (again, *_) = started(launcher, "listens", first.address)
    assert again == second.address == first.address
    assert second.began > 0, "both write one log"
    second.end()
    assert second.code() == 7


def test_a_process_that_does_not_listen_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    process, (*_, own) = started(LocalLauncher(tmp_path), "ignores")
    process.ask()
    time.sleep(0.3)
    assert process.code() is None
    began = time.monotonic()
    process.kill()
    assert time.monotonic() - began < 5, "it does not wait for the ten seconds that a process has to end"
    assert process.code() == 128 + signal.SIGKILL
    assert gone(int(own))
    process.kill()
