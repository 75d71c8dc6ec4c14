"""Idle threads: when they are sent to sleep, on written figures of the cores, and that they do sleep, by the CPU time they use."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from nmoe.cores import CoreTimes, usable_cores
from nmoe.model import idle_threads
from nmoe.model.idle_threads import IDLE, IdleThreads, Libgomp, Libomp, find_runtime


class Recorded:
    """A runtime that records what is asked of it."""

    name = "recorded"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.can = True

    def sleep(self, threads: int, again: Callable[[], None]) -> bool:
        self.asked.append(f"sleep {threads}")
        return self.can

    def spin(self) -> None:
        self.asked.append("spin")


class Machine:
    """Cores whose use by others is written down: `others` of them from now on."""

    def __init__(self, threads: int = 2) -> None:
        self.clock = self.busy = self.own = self.others = 0.0
        self.threads, self.runtime = threads, Recorded()
        self.idle = IdleThreads(
            self.runtime,
            environment={},
            times=lambda: CoreTimes(self.clock, self.busy, self.own),
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
        self.idle.look()
        return list(self.runtime.asked)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(idle_threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(idle_threads, "cpu_quota", lambda: float("inf"))
    return Machine()


def test_they_sleep_beside_others_and_spin_after_three_free_seconds(machine: Machine) -> None:
    machine.others = 0.2  # the background of a machine that is free
    assert [machine.pass_(1.0) for _ in range(3)] == [[], [], []]
    machine.others = 0.5
    assert machine.pass_(1.0) == ["sleep 2"]
    assert (machine.idle.sleeping, machine.idle.used_by_others) == (True, pytest.approx(0.5))
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


def test_a_quota_below_the_threads_lets_them_sleep(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_threads, "cpu_quota", lambda: 1.5)
    assert machine.pass_(1.0) == ["sleep 2"]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_setting_of_the_users_stays(name: str) -> None:
    idle = IdleThreads(Recorded(), environment={name: "7"})
    assert idle.runtime is None
    assert idle.describe() == f"wait as {name}=7 says"


def test_without_figures_of_the_cores_nothing_is_steered() -> None:
    assert IdleThreads(Recorded(), environment={}, times=lambda: None).runtime is None


def test_where_threads_cannot_be_had_it_is_left_at_that(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.runtime.can, machine.others = False, 2.0
    assert [machine.pass_(1.0) for _ in range(2)] == [["sleep 2"], []]
    assert (machine.idle.sleeping, machine.idle.slept) == (False, 0)
    assert machine.idle.describe() == "wait as their OpenMP runtime has it"
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(idle_threads, "_CORES_AT_START", 4)
    teams: list[int] = []
    assert not Libgomp(lambda threads, flags: teams.append(threads)).sleep(2, lambda: None)
    assert teams == []
    assert not any(thread.is_alive() for thread in started)


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


def test_libomp_gets_its_own_blocktime_back() -> None:
    now = [200]

    def set_(value: int) -> None:
        now[0] = value

    runtime = Libomp(lambda: now[0], set_)
    runtime.sleep(2, lambda: None)
    assert now == [0]
    runtime.spin()
    assert now == [200]


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


def test_this_process_has_one() -> None:
    assert IDLE.describe().startswith(("spin while", "wait as"))
