"""Claiming a delegated cgroup and writing limits, in a directory that answers as the kernel does; test_cgroups_in_force.py asks a
real one."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.sandbox import cgroups
from nmoe.sandbox.api import Limits, Result, SandboxSetupError
from nmoe.sandbox.cgroups import Cgroup, Cgroups, NotDelegatedError
from nmoe.sandbox.inside.protocol import SIZES, answer
from nmoe.sandbox.process import Process, ProcessSandbox

MIB = 1 << 20
LIMITS = Limits(memory_mb=128, processes=24, output_kb=64)
NEW = {"cgroup.procs": "", "cgroup.type": "domain\n", "cgroup.subtree_control": "", "cgroup.kill": ""}
LIMITED = {"memory.max": "max\n", "memory.swap.max": "max\n", "pids.max": "max\n", "cpu.max": "max 100000\n"}
EVENTS = "low 0\nhigh 0\nmax 3\noom 1\noom_kill {}\noom_group_kill 0\n"


class Kernel:
    """A cgroup v2 directory as files: what is written moves, kills and is refused as by the kernel."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = directory
        self._mkdir, self._rmdir = os.mkdir, os.rmdir
        self.gone: set[str] = set()
        self.make(directory, controllers="cpuset cpu io memory pids\n")
        monkeypatch.setattr(cgroups, "_write", self.write)
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(os, "rmdir", self.rmdir)

    def make(self, path: Path, controllers: str = "") -> None:
        self._mkdir(path)
        events = {"memory.events": EVENTS.format(0)}
        for name, text in {**NEW, **LIMITED, **events, "cgroup.controllers": controllers}.items():
            (path / name).write_text(text)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        if str(path).startswith(f"{self.top}/"):
            self.make(Path(path))
        else:
            self._mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        if (Path(path) / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        for file in Path(path).iterdir():
            file.unlink()
        self._rmdir(path)

    def write(self, path: str, text: str) -> None:
        file = Path(path)
        if file.name == "cgroup.procs":
            if text in self.gone:
                self._leave(text)
                raise ProcessLookupError
            self._leave(text)
            file.write_text(f"{file.read_text()}{text}\n")
        elif file.name == "cgroup.subtree_control":
            if (file.parent / "cgroup.type").exists() and (file.parent / "cgroup.procs").read_text():
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            file.write_text(text.replace("+", ""))
        elif file.name == "cgroup.kill":
            (file.parent / "cgroup.procs").write_text("")
        else:
            file.write_text(text)

    def _leave(self, pid: str) -> None:
        for file in self.top.rglob("cgroup.procs"):
            file.write_text("".join(line for line in file.read_text().splitlines(True) if line.strip() != pid))

    def read(self, name: str) -> str:
        return (self.top / name).read_text()

    def children(self) -> list[str]:
        return sorted(path.name for path in self.top.iterdir() if path.is_dir())


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path / "delegated", monkeypatch)


def test_a_claimed_directory_keeps_no_processes(kernel: Kernel) -> None:
    (kernel.top / "cgroup.procs").write_text("10\n11\n12\n")
    kernel.gone = {"11"}
    Cgroups.claim(str(kernel.top))
    assert kernel.read("cgroup.procs") == ""
    assert kernel.read("nmoe/cgroup.procs") == "10\n12\n"
    assert kernel.read("cgroup.subtree_control") == "memory pids"
    assert kernel.children() == ["nmoe"], "the cgroup that was tried is gone"
    Cgroups.claim(str(kernel.top), cpus=2.0)
    assert kernel.read("cgroup.subtree_control") == "memory pids cpu"


def test_processes_that_this_pid_namespace_does_not_see_are_a_reason(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lists each as 0, and takes a 0 that is written for the writer: moving them would never end."""
    (kernel.top / "cgroup.procs").write_text("0\n12\n")
    moved: list[str] = []

    def write(path: str, text: str) -> None:
        moved.append(text)
        assert len(moved) < 20, "it does not end"
        if text != "0":
            kernel.write(path, text)

    monkeypatch.setattr(cgroups, "_write", write)
    with pytest.raises(NotDelegatedError, match="has processes of another pid namespace"):
        Cgroups.claim(str(kernel.top))


def test_the_root_of_a_hierarchy_keeps_its_processes(kernel: Kernel) -> None:
    (kernel.top / "cgroup.type").unlink()
    (kernel.top / "cgroup.procs").write_text("1\n2\n")
    Cgroups.claim(str(kernel.top))
    assert kernel.read("cgroup.procs") == "1\n2\n"
    assert kernel.children() == []


def test_limits_of_a_call(kernel: Kernel) -> None:
    made = Cgroups(str(kernel.top), cpus=1.5).make(disk_mb=16)

    def limits() -> list[str]:
        return [(Path(made.path) / name).read_text() for name in LIMITED]

    assert limits() == ["max\n", "0", "max\n", "150000 100000"]
    made.limit(LIMITS)
    # 128 MB and the disk's 16, 32 for the agent and twice the output; the launcher and the agent are processes too.
    assert limits() == [str(176 * MIB + 131072), "0", "26", "150000 100000"]
    made.limit(LIMITS, message_bytes=5 * MIB)
    assert limits()[0] == str(196 * MIB + 131072)
    made.limit(replace(LIMITS, memory_mb=1, processes=3))
    assert limits()[0::2] == [str(49 * MIB + 131072), "5"]
    made.remove()
    assert kernel.children() == []


def test_a_kernel_that_counts_no_swap(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LIMITED, "memory.swap.max")
    assert not (Path(Cgroups(str(kernel.top)).make(16).path) / "memory.swap.max").exists()


def test_what_a_killed_run_left_is_removed_and_what_is_in_use_is_not(kernel: Kernel) -> None:
    used = Cgroups(str(kernel.top)).make(16)
    left = kernel.top / "nmoe-sandbox-left"
    kernel.make(left)
    (left / "cgroup.procs").write_text("77\n")
    kernel.make(kernel.top / "another")
    Cgroups.claim(str(kernel.top))
    assert kernel.children() == ["another", "nmoe", Path(used.path).name]
    used.remove()
    assert kernel.children() == ["another", "nmoe"]


def test_a_sandbox_that_another_run_closes_meanwhile_costs_no_limits(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*listed(path), "nmoe-sandbox-just-closed"])
    found, described = cgroups.cgroups_of(SandboxSettings(cgroup_directory=str(kernel.top)))
    assert found is not None, described


def test_two_that_claim_at_once_do_not_meet(kernel: Kernel) -> None:
    """The directory is locked while it is changed."""
    held = os.open(kernel.top, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    claiming = threading.Thread(target=Cgroups.claim, args=(str(kernel.top),))
    claiming.start()
    claiming.join(0.1)
    assert claiming.is_alive()
    assert kernel.children() == []
    os.close(held)
    claiming.join()
    assert kernel.children() == ["nmoe"]


def refusing(name: str, number: int, kernel: Kernel) -> Callable[[str, str], None]:
    def write(path: str, text: str) -> None:
        if os.path.basename(path) == name:
            raise OSError(number, os.strerror(number), path)
        kernel.write(path, text)

    return write


def test_why_there_are_none(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    top = str(kernel.top)
    (kernel.top / "cgroup.controllers").write_text("cpu pids\n")
    with pytest.raises(NotDelegatedError, match=f"^{top} has no controller memory$"):
        Cgroups.claim(top)
    (kernel.top / "cgroup.controllers").write_text("memory pids\n")
    with pytest.raises(NotDelegatedError, match=r"has no controller cpu$"):
        Cgroups.claim(top, cpus=1.0)
    for name, number in (
        ("cgroup.subtree_control", errno.EACCES),
        ("cgroup.procs", errno.EPERM),
        ("pids.max", errno.EIO),
    ):
        (kernel.top / "cgroup.subtree_control").write_text("")
        (kernel.top / "cgroup.procs").write_text("10\n")
        monkeypatch.setattr(cgroups, "_write", refusing(name, number, kernel))
        with pytest.raises(NotDelegatedError, match=f"^{os.strerror(number)}: {top}/.*{name}$"):
            Cgroups.claim(top)
        assert not [name for name in kernel.children() if name.startswith("nmoe-sandbox")]
    with pytest.raises(NotDelegatedError, match="No such file or directory: /nowhere"):
        Cgroups.claim("/nowhere")


def test_a_cgroup_that_lets_go_of_its_processes(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_write", lambda path, text: path.endswith("procs") or kernel.write(path, text))
    with pytest.raises(NotDelegatedError, match="does not keep a process that was put there"):
        Cgroups.claim(str(kernel.top))
    assert kernel.children() == ["nmoe"]


MOUNTS = (
    "25 20 0:22 / /proc rw - proc proc rw\n30 24 0:27 {root} {at} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
)


@pytest.fixture
def own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`cgroups._own_directory` of a process in the cgroup `path`, where the hierarchy's `root` is mounted above the fake one."""

    def find(path: str, *, root: str = "/", mounts: str = MOUNTS, uid: int = 1000, mark: bytes | None = None) -> str:
        texts = {
            "/proc/self/cgroup": f"4:memory:/somewhere\n0::{path}\n" if path else "4:memory:/somewhere\n",
            "/proc/self/mountinfo": mounts.format(root=root, at=kernel.top.parent),
        }

        def getxattr(path: str, name: str) -> bytes:
            if mark is None or name != "user.delegate":
                raise OSError(errno.ENODATA, "No data available")
            return mark

        monkeypatch.setattr(cgroups, "_read", texts.__getitem__)
        monkeypatch.setattr(os, "getuid", lambda: uid)
        monkeypatch.setattr(os, "getxattr", getxattr)
        return cgroups._own_directory()

    return find


def test_the_cgroup_of_this_process(kernel: Kernel, own: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    top = str(kernel.top)
    assert own("/delegated") == top
    assert own("/delegated/nmoe") == top, "where an earlier claim has moved it"
    assert own("/user/delegated", root="/user") == top, "of a mount that shows a part of the hierarchy"
    with pytest.raises(NotDelegatedError, match=r"/other/cgroup\.procs is not writable"):
        own("/other")
    for path, mounts in (("/delegated", MOUNTS.splitlines()[0]), ("", MOUNTS)):
        with pytest.raises(NotDelegatedError, match="cgroup v2 is not mounted"):
            own(path, mounts=mounts)


def test_root_takes_no_cgroup_that_nobody_gave_it(kernel: Kernel, own: Callable[..., str]) -> None:
    top = str(kernel.top)
    with pytest.raises(NotDelegatedError, match="delegated is not marked as delegated"):
        own("/delegated", uid=0)
    with pytest.raises(NotDelegatedError, match="not marked"):
        own("/delegated/nmoe", uid=0, mark=b"0")
    assert own("/delegated", uid=0, mark=b"1") == top
    kernel.make(kernel.top.parent / "x")
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        (kernel.top.parent / name).write_text("")
    assert own("/", uid=0) == str(kernel.top.parent), "a container's own hierarchy"
    assert own("/nmoe", uid=0) == str(kernel.top.parent)


def test_what_the_settings_ask_for(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    top = str(kernel.top)
    found, said = cgroups.cgroups_of(SandboxSettings(cgroup="required", cgroup_directory=top, cpus=0.5))
    assert found == Cgroups(top, 0.5)
    assert said == "cgroup limits of memory and processes, 0.5 CPUs"
    assert cgroups.cgroups_of(SandboxSettings(cgroup_directory=top))[1] == "cgroup limits of memory and processes"

    def none(*_: object) -> Cgroups:
        raise NotDelegatedError("cgroup v2 is not mounted")

    monkeypatch.setattr(Cgroups, "claim", none)
    assert cgroups.cgroups_of(SandboxSettings()) == (None, "no cgroup limits (cgroup v2 is not mounted)")
    for asked, name in (
        (SandboxSettings(cgroup="required"), 'sandbox.cgroup = "required"'),
        (SandboxSettings(cgroup_directory=top), "sandbox.cgroup_directory"),
        (SandboxSettings(cpus=2), "sandbox.cpus"),
        (SandboxSettings(cgroup="required", cpus=2), 'sandbox.cgroup = "required" and sandbox.cpus'),
    ):
        with pytest.raises(SandboxSetupError) as refused:
            cgroups.cgroups_of(asked)
        assert str(refused.value).startswith(f"sandbox_setup_failed: {name} cannot be had: cgroup v2 is not mounted;")
        assert "systemd-run --user --scope" in str(refused.value)
        assert refused.value.exit_code == 2


def test_off_claims_nothing(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cgroups, "claim", lambda *_: pytest.fail("it was to be left alone"))
    assert cgroups.cgroups_of(SandboxSettings(cgroup="off")) == (None, "no cgroup limits (sandbox.cgroup is off)")
    for name, value in (("cpus", 1.0), ("cgroup_directory", "/sys/fs/cgroup/x")):
        with pytest.raises(ValidationError, match=name):
            SandboxSettings.model_validate({"cgroup": "off", name: value})


@pytest.mark.parametrize(
    ("said", "kills", "failure"),
    [
        ("nonzero_exit", 2, "out_of_memory"),
        ("ok", 2, "out_of_memory"),  # one of its processes was killed, and the others ended well
        ("nonzero_exit", 1, "nonzero_exit"),  # killed in an earlier call
        (None, 2, "out_of_memory"),  # the agent itself
        (None, 1, "internal_error"),
    ],
)
def test_what_the_kernel_killed_is_out_of_memory(kernel: Kernel, said: str | None, kills: int, failure: str) -> None:
    cgroup = Cgroups(str(kernel.top)).make(16)
    events = Path(cgroup.path) / "memory.events"
    events.write_text(EVENTS.format(1))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def agent() -> None:
        header, body = SIZES.unpack(theirs.recv(SIZES.size))
        theirs.recv(header + body)
        events.write_text(EVENTS.format(kills))
        if said is not None:
            theirs.sendall(answer(said, 137, (0.1, 0.1, 0.0), b"", b""))
            theirs.recv(1)
        theirs.close()

    async def call() -> tuple[Result, bool]:
        sandbox = ProcessSandbox(Process(-1, ours), LIMITS, None, cgroup)
        async with sandbox:
            result = await sandbox.bash("true")
            return result, (Path(cgroup.path) / "pids.max").exists()

    thread = threading.Thread(target=agent)
    thread.start()
    result, kept = asyncio.run(call())
    thread.join()
    assert result.failure == failure
    assert result.exit_code == (137 if failure == "nonzero_exit" else None)
    assert kept == (said is not None), "a sandbox that is lost has no cgroup any more"
    assert kernel.children() == []


def test_other_tasks_run_while_a_cgroup_is_removed() -> None:
    """Removal waits for the kernel to let go of the last process; here it waits until another task of the loop has run."""
    ran = threading.Event()
    waited: list[bool] = []

    class Slow(Cgroup):
        def __init__(self) -> None:
            super().__init__("/nowhere", 0, -1)

        def remove(self) -> None:
            waited.append(ran.wait(5))

    async def close() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            closing = asyncio.create_task(ProcessSandbox(Process(-1, ours), LIMITS, None, Slow()).close())
            while not waited and not closing.done():
                await asyncio.sleep(0.001)
                ran.set()
            await closing

    asyncio.run(close())
    assert waited == [True]


def test_a_cgroup_that_stays_busy_is_left_to_the_next_run(kernel: Kernel) -> None:
    made: Cgroup = Cgroups(str(kernel.top)).make(16)
    (Path(made.path) / "cgroup.procs").write_text("5\n")
    made.remove()
    assert kernel.children() == [Path(made.path).name]
    Cgroups.claim(str(kernel.top))
    assert kernel.children() == ["nmoe"]
