"""Idle threads: when they are sent to sleep, on written figures of the cores, and that they do sleep, by the CPU time they use."""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from nmoe.cores import CoreTimes, usable_cores
from nmoe.model import idle_threads
from nmoe.model.idle_threads import IDLE, IdleThreads, Libgomp, find_runtime


class Recorded(Libgomp):
    """A runtime that records what is asked of it."""

    name = "recorded"

    def __init__(self) -> None:
        super().__init__(lambda threads, flags: None)
        self.asked: list[str] = []
        self.can = True

    def sleep(self, threads: int, again: Callable[[], None]) -> bool:
        self.asked.append(f"sleep {threads}")
        return self.can

    def spin(self) -> None:
        self.asked.append("spin")


class Machine:
    """Cores whose use by others is written down: `others` of them from now on, and `in_quota` of the quota."""

    def __init__(self, threads: int = 2) -> None:
        self.clock = self.busy = self.own = self.others = self.in_quota = self.of_quota = 0.0
        self.quota = math.inf
        self.threads, self.runtime = threads, Recorded()
        self.idle = IdleThreads(
            self.runtime,
            environment={},
            times=lambda: CoreTimes(self.clock, self.busy, self.own, self.quota, self.of_quota),
            clock=lambda: self.clock,
            threads=lambda: self.threads,
        )
        self.idle.look()

    def pass_(self, seconds: float) -> list[str]:
        """Lets time pass, in which this process works on all its threads, and looks; returns what was asked of the runtime."""
        self.runtime.asked.clear()
        self.clock += seconds
        self.own += self.threads * seconds
        self.busy += (self.threads + self.others) * seconds
        self.of_quota += (self.threads + self.in_quota) * seconds
        self.idle.look()
        return list(self.runtime.asked)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(idle_threads, "usable_cores", lambda: 2)
    return Machine()


def test_they_sleep_beside_others_and_spin_after_three_free_seconds(machine: Machine) -> None:
    machine.others = 0.2  # the background of a machine that is free
    assert [machine.pass_(1.0) for _ in range(3)] == [[], [], []]
    machine.others = 0.5
    assert machine.pass_(1.0) == ["sleep 2"]
    assert (machine.idle.sleeping, machine.idle.why) == (True, "other processes use 0.5 cores")
    assert machine.pass_(1.0) == []  # they sleep already
    machine.others = 0.0
    assert [machine.pass_(1.0) for _ in range(2)] == [[], []]
    machine.others = 1.0
    assert machine.pass_(1.0) == []  # so the count begins again
    machine.others = 0.0
    assert [machine.pass_(1.0) for _ in range(3)] == [[], [], ["spin"]]
    assert (machine.idle.sleeping, machine.idle.slept) == (False, 1)


def test_a_program_gets_them_back_as_they_were(machine: Machine) -> None:
    machine.idle.restore()
    assert machine.runtime.asked == []
    machine.others = 2.0
    machine.pass_(1.0)
    machine.idle.restore()
    assert (machine.runtime.asked, machine.idle.sleeping) == (["sleep 2", "spin"], False)


def test_it_looks_once_a_second(machine: Machine) -> None:
    machine.others = 2.0
    assert [machine.pass_(0.3) for _ in range(4)] == [[], [], [], ["sleep 2"]]


def test_a_pause_says_nothing_of_the_present(machine: Machine) -> None:
    machine.others = 2.0
    assert machine.pass_(90.0) == []
    machine.others = 0.0
    assert machine.pass_(1.0) == []


def test_one_thread_has_none_to_wait_for(machine: Machine) -> None:
    machine.threads, machine.others = 1, 2.0
    assert [machine.pass_(1.0) for _ in range(3)] == [[], [], []]
    assert not machine.idle.sleeping


def test_a_quota_below_the_threads_lets_them_sleep(machine: Machine) -> None:
    machine.quota = 1.5
    assert machine.pass_(1.0) == ["sleep 2"]
    assert machine.idle.why == "the CPU quota is 1.5 cores, of which other processes use 0.0"


def test_neighbours_in_the_quota_let_them_sleep_on_a_machine_with_free_cores(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container: 2 of 64 cores."""
    monkeypatch.setattr(idle_threads, "usable_cores", lambda: 64)
    machine.quota, machine.others = 2.0, 40.0
    assert [machine.pass_(1.0) for _ in range(2)] == [[], []]
    machine.in_quota = 1.5
    assert machine.pass_(1.0) == ["sleep 2"]
    assert machine.idle.why == "the CPU quota is 2 cores, of which other processes use 1.5"
    machine.in_quota = 0.2
    assert [machine.pass_(1.0) for _ in range(3)] == [[], [], ["spin"]]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY"])
def test_a_setting_of_the_users_stays(name: str) -> None:
    idle = IdleThreads(Recorded(), environment={name: "7"})
    assert idle.runtime is None
    assert idle.describe() == f"wait as {name}=7 says"


def test_without_figures_of_the_cores_nothing_is_steered() -> None:
    idle = IdleThreads(Recorded(), environment={}, times=lambda: None)
    idle.look()
    assert idle.runtime is None


@pytest.mark.parametrize(
    "error", [OSError("a limit"), ValueError("a file"), RuntimeError("a thread"), TypeError("all else")]
)
@pytest.mark.parametrize("at", ["sleep", "spin", "times"])
def test_a_failure_ends_the_looking_and_not_the_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception, at: str
) -> None:
    runtime = machine.runtime

    def fail(*_: object) -> bool:
        raise error

    machine.others = 2.0
    if at != "sleep":
        assert machine.pass_(1.0) == ["sleep 2"]
        machine.others = 0.0
    if at == "times":
        monkeypatch.setattr(machine.idle, "_times", fail)
    elif at == "sleep":
        monkeypatch.setattr(runtime, "sleep", fail)
    else:
        failing = iter((True, False))
        monkeypatch.setattr(runtime, "spin", lambda: next(failing) and fail())
    for _ in range(3):
        machine.pass_(1.0)
    assert (machine.idle.runtime, machine.idle.sleeping) == (None, False)
    assert machine.idle.describe() == "use the OpenMP runtime's default"
    machine.idle.look()
    machine.idle.restore()


def test_a_thread_that_cannot_be_had_after_all_leaves_the_default(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took the last of what is allowed, between the test and the team."""
    monkeypatch.setattr(idle_threads, "can_start", lambda count: True)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    machine.idle.runtime, machine.others = Libgomp(lambda threads, flags: None), 2.0
    machine.pass_(1.0)
    assert (machine.idle.runtime, machine.idle.sleeping, machine.idle.slept) == (None, False, 0)


def test_a_team_that_fails_is_no_sleep(machine: Machine) -> None:
    def fail(threads: int, flags: int) -> None:
        raise OSError("no such function")

    assert not Libgomp(fail).sleep(2, lambda: None)


def test_a_forked_child_leaves_it(machine: Machine) -> None:
    """The child has neither the team nor whoever holds the lock."""
    machine.others = 2.0
    machine.pass_(1.0)
    machine.idle._lock.acquire()
    machine.idle.leave()
    machine.idle.restore()
    assert (machine.idle.runtime, machine.idle.sleeping) == (None, False)
    with IDLE._lock:
        child = os.fork()
        if child == 0:
            os._exit(int(IDLE.runtime is not None or IDLE._lock.locked()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_where_threads_cannot_be_had_it_is_left_at_that(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.runtime.can, machine.others = False, 2.0
    assert [machine.pass_(1.0) for _ in range(2)] == [["sleep 2", "spin"], []]
    assert (machine.idle.sleeping, machine.idle.slept) == (False, 0)
    assert machine.idle.describe() == "use the OpenMP runtime's default"


def test_a_team_is_tried_with_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 9 threads that are allowed a team of 4 may take 8 to try, one of 5 would take 10."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if sum(one.is_alive() for one in started) == 9:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(idle_threads, "usable_cores", lambda: 4)
    teams: list[int] = []
    for cores, allowed in ((5, False), (4, True)):
        monkeypatch.setattr(idle_threads, "_CORES_AT_START", cores)
        runtime = Libgomp(lambda threads, flags: teams.append(threads))
        assert runtime.sleep(2, lambda: None) is allowed
        runtime.spin()
    assert teams == [4]
    for thread in started:
        thread.join(5)
    assert not any(thread.is_alive() for thread in started)


def test_the_threads_of_a_trial_have_ended_before_the_team_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is joined still counts against the limit for a moment; libgomp would end the process for it."""
    seen: list[str] = []

    class Task(SimpleNamespace):
        def exists(self) -> bool:
            seen.append(self.path)
            return len(seen) < 5

    monkeypatch.setattr(idle_threads, "Path", lambda path: Task(path=path))
    assert idle_threads.can_start(2)
    assert len(seen) == 6  # the first of two four times, then both
    assert len(set(seen)) == 2
    monkeypatch.setattr(idle_threads, "_READY_S", 0.01)
    monkeypatch.setattr(Task, "exists", lambda self: True)
    assert not idle_threads.can_start(2)


def test_a_team_makes_the_threads_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_threads, "_CORES_AT_START", 6)
    monkeypatch.setattr(idle_threads, "usable_cores", lambda: 4)  # of 6 when libgomp was loaded
    teams: list[int] = []
    runtime = Libgomp(lambda threads, flags: teams.append(threads))
    for threads in (2, 6, 16):
        assert runtime.sleep(threads, lambda: None)
        runtime.spin()
    assert teams == [
        6,
        2,
        2,
    ]  # with the 2, 6 and 16 of the first team more than 6 in each case, as the caller is of both


# After each product the process pauses: the CPU time of the pauses is that of idle threads.
_PAUSES = """
import time, torch
from nmoe.model.idle_threads import find_runtime
torch.set_num_threads(2)
x = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
results, runtime = [], find_runtime()

def in_pauses():
    used = 0.0
    for _ in range(30):
        results.append(x @ x)
        before = time.process_time()
        time.sleep(0.002)
        used += time.process_time() - before
    return used

in_pauses()
spinning = in_pauses()
runtime.sleep(2, lambda: None)
in_pauses()
sleeping = in_pauses()
runtime.spin()
time.sleep(1.2)  # the team ends within a second
in_pauses()
again = in_pauses()
assert all(torch.equal(one, results[0]) for one in results)
print(spinning, sleeping, again)
"""


@pytest.mark.long  # measures CPU time in pauses of 2 ms, which other programs disturb
@pytest.mark.skipif(usable_cores() < 2, reason="one core: idle threads never spin")
@pytest.mark.skipif(not isinstance(find_runtime(), Libgomp), reason="torch computes with another OpenMP runtime")
def test_idle_threads_of_libgomp_sleep_and_spin_again() -> None:
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    ended = subprocess.run(
        [sys.executable, "-c", _PAUSES], env=unset, capture_output=True, text=True, check=True, timeout=120
    )
    spinning, sleeping, again = map(float, ended.stdout.split())
    assert sleeping < spinning / 3
    assert again > 3 * sleeping


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is steered elsewhere")
def test_the_runtime_is_that_of_the_loaded_libraries() -> None:
    with open("/proc/self/maps") as file:
        loaded = {os.path.basename(line.split()[-1]) for line in file if ".so" in line}
    gcc = any(name.startswith("libgomp") for name in loaded)
    other = any(name.startswith(("libomp", "libiomp")) for name in loaded)
    assert isinstance(find_runtime(), Libgomp) == (gcc and not other)


def test_libomp_is_left_alone_though_it_has_the_function_of_libgomp(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(GOMP_parallel=SimpleNamespace(), free=None, kmp_set_blocktime=SimpleNamespace())
    monkeypatch.setattr(idle_threads, "_libraries", lambda: iter([library]))
    assert find_runtime() is None


# One sleep and one spin for each number of threads that the system allows more, by a user who is held to it.
_ALLOWED = """
import os, resource, time, torch
from nmoe.model import idle_threads
torch.set_num_threads(2)
torch.ones(300, 300) @ torch.ones(300, 300)
idle_threads._CORES_AT_START = 30
os.setresuid(54321, 54321, 54321)
have, most = len(os.listdir("/proc/self/task")), resource.getrlimit(resource.RLIMIT_NPROC)[1]
for room in (20, 29, 30, 31, 45, 59, 61, 62, 70):
    resource.setrlimit(resource.RLIMIT_NPROC, (have + room, most))
    for _ in range(10):
        runtime = idle_threads.find_runtime()
        could = runtime.sleep(2, lambda: None)
        runtime.spin()
        while len(os.listdir("/proc/self/task")) > have:
            time.sleep(0.001)
    print(room, could)
"""


@pytest.mark.long  # sets the limits of another user
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.skipif(not isinstance(find_runtime(), Libgomp), reason="torch computes with another OpenMP runtime")
def test_no_limit_on_threads_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", _ALLOWED], capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    said = dict(line.split() for line in ended.stdout.splitlines())
    assert {room for room, could in said.items() if could == "True"} == {"61", "62", "70"}
