"""cgroup limits as the kernel holds them. Needs a delegated cgroup v2, or a kernel of its own: scripts/cgroup_check.sh."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from boxes import LEVELS, LIMITS, Box, sandboxes_of

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.sandbox import cgroups
from nmoe.sandbox.cgroups import Cgroup, Cgroups
from nmoe.sandbox.sandboxes import Sandboxes

pytestmark = pytest.mark.cgroup
# A process that takes megabytes and keeps them, faster than anybody looks.
HOARD = "hoard = [b'x' * (1 << 20) for _ in range({})]; print('had them', flush=True); import time; time.sleep(1)"


@pytest.fixture
def delegated() -> Iterator[Path]:
    """A directory below this process's own, with controllers to give away."""
    above = Cgroups.claim(cpus=1.0).directory
    directory = Path(above) / f"nmoe-test-{secrets.token_hex(4)}"
    directory.mkdir()
    yield directory
    for path in [*directory.iterdir(), directory]:
        if path.is_dir():
            path.rmdir()


@pytest.fixture(params=LEVELS)
def sandboxes(delegated: Path, request: pytest.FixtureRequest) -> Iterator[Sandboxes]:
    opened = sandboxes_of(request.param, cgroup_directory=str(delegated))
    yield opened
    asyncio.run(opened.close())


@pytest.fixture
def small(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the cgroup that are reached before those that the agent watches: 44 MB and some, and 14 processes."""
    monkeypatch.setattr(cgroups, "_KEEPERS_MB", -100)
    monkeypatch.setattr(cgroups, "_KEEPERS", -10)


def only_child(delegated: Path) -> Path:
    (found,) = delegated.glob("nmoe-sandbox-*")
    return found


def test_a_sandbox_has_one_while_it_lives(sandboxes: Sandboxes, box: Box, delegated: Path) -> None:
    assert "cgroup limits of memory and processes" in sandboxes.describe()
    group = only_child(delegated)
    result = box(box.sandbox.python("print(open('/proc/self/cgroup').read())"))
    assert "0::/\n" in result.stdout.decode(), "it sees none of the host's names"
    assert (group / "memory.max").read_text() == f"{(176 << 20) + 131072}\n"
    assert (group / "pids.max").read_text() == "26\n"
    assert (group / "pids.current").read_text() == "2\n", "the launcher and the agent"
    box(box.sandbox.close())
    assert list(delegated.glob("nmoe-sandbox-*")) == []


def test_the_kernel_ends_what_takes_more_memory(small: None, box: Box, delegated: Path) -> None:
    box(box.sandbox.write("kept", b"what the trajectory did"))
    began = time.monotonic()
    result = box(box.sandbox.python(HOARD.format(100)))
    assert (result.failure, result.exit_code, result.stdout) == ("out_of_memory", None, b"")
    assert time.monotonic() - began < 5
    assert Cgroup(str(only_child(delegated)), 16, -1).kills() == 1
    assert box(box.sandbox.read("kept")) == b"what the trajectory did"
    assert box(box.sandbox.python("print(1)")).failure == "ok", "an earlier kill is not this call's"


def test_who_takes_the_agent_along_has_run_out_of_memory(small: None, box: Box) -> None:
    """Code may make itself as likely to be killed as the agent, and end its own sandbox so: by no other name."""
    code = """
import os, time
open("/proc/self/oom_score_adj", "w").write("0")
for _ in range(11):
    if os.fork() == 0:
        hoard = b"x" * (6 << 20)
        time.sleep(9)
        os._exit(0)
time.sleep(9)
"""
    assert box(box.sandbox.python(code)).failure == "out_of_memory"


def test_memory_that_no_process_shows(small: None, box: Box) -> None:
    """Files of 12 MB are on the disk, and the rest of the 44 is not enough for 28 more."""
    box(box.sandbox.bash("head -c 6M /dev/zero > a; head -c 6M /dev/zero > b"))
    assert box(box.sandbox.python(HOARD.format(28))).failure == "out_of_memory"
    box(box.sandbox.bash("rm a b"))
    fits = box(box.sandbox.python(HOARD.format(16)))
    assert (fits.failure, fits.stdout) == ("ok", b"had them\n")


def test_the_kernel_counts_processes(small: None, box: Box) -> None:
    code = """
import os, time
for number in range(99):
    try:
        if os.fork() == 0:
            time.sleep(9)
    except OSError as error:
        print(number, error.errno)
        break
"""
    # 14 with the launcher, the agent and the first process.
    assert box(box.sandbox.python(code)).stdout == b"11 11\n"


def test_cpus(delegated: Path, loop: asyncio.Runner) -> None:
    settings = SandboxSettings(warm=0, cgroup_directory=str(delegated), cpus=0.25)

    async def spin() -> float:
        opened = Sandboxes(settings, LIMITS)
        async with await opened.open() as sandbox:
            spun = await sandbox.bash("while :; do :; done & while :; do :; done", limits=replace(LIMITS, wall_s=2.0))
        await opened.close()
        return spun.cpu_s

    assert 0.1 < loop.run(spin()) < 0.75


# Claims its own cgroup, says which, and opens a sandbox there until it is killed. Another user's interpreter may lie in a directory
# that this one cannot see.
HOST = """
import asyncio, os, sys, time
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.sandbox.cgroups import Cgroups
from nmoe.sandbox import probe
from nmoe.sandbox.sandboxes import Sandboxes
uid, own = int(sys.argv[1]), os.getuid()
if uid != own:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
async def main():
    python = None if uid == own else "/usr/bin/python3"
    opened = Sandboxes(SandboxSettings(warm=0, cgroup="required", python=python))
    async with await opened.open() as sandbox:
        await sandbox.python("1")
        print(Cgroups.claim().directory, flush=True)
        time.sleep(60)
asyncio.run(main())
"""


def start(delegated: Path, uid: int) -> subprocess.Popen[bytes]:
    def join() -> None:
        (delegated / "cgroup.procs").write_text("0")

    command = [sys.executable, "-c", HOST, str(uid)]
    return subprocess.Popen(
        command, preexec_fn=join, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


@pytest.fixture
def given(delegated: Path) -> Callable[[int], None]:
    """Gives the directory to a user, as systemd does."""

    def give(uid: int) -> None:
        for path in (
            delegated,
            delegated / "cgroup.procs",
            delegated / "cgroup.subtree_control",
            delegated / "cgroup.threads",
        ):
            os.chown(path, uid, uid)

    return give


def test_a_killed_run_leaves_what_the_next_removes(delegated: Path, given: Callable[[int], None]) -> None:
    uid = os.getuid() or 1234
    given(uid)
    with start(delegated, uid) as host:
        assert host.stdout is not None
        assert host.stderr is not None
        said = host.stdout.readline()
        assert said.decode().strip() == str(delegated), host.stderr.read().decode()
        assert (delegated / "nmoe/cgroup.procs").read_text().split() != [], "the run itself has moved"
        assert (delegated / "cgroup.procs").read_text() == ""
        Cgroups.claim(str(delegated))
        left = only_child(delegated)
        host.send_signal(signal.SIGKILL)
    for _ in range(500):
        if "populated 0" in (left / "cgroup.events").read_text():
            break
        time.sleep(0.01)
    assert "populated 0" in (left / "cgroup.events").read_text(), "the sandbox outlived its host"
    Cgroups.claim(str(delegated))
    assert list(delegated.glob("nmoe-sandbox-*")) == []


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user can write only to what was given to it")
def test_root_does_not_take_what_was_not_given(delegated: Path) -> None:
    with start(delegated, 0) as host:
        assert host.stderr is not None
        said = host.stderr.read().decode()
    assert f"{delegated} is not marked as delegated" in said
    os.setxattr(delegated, "trusted.delegate", b"1")
    with start(delegated, 0) as host:
        assert host.stdout is not None
        assert host.stdout.readline().decode().strip() == str(delegated)
        host.kill()
