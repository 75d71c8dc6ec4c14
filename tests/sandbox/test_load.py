"""A deadline that passes because others have the CPUs is no verdict; one that the solution brought about is."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
from dataclasses import replace

import pytest
from boxes import LIMITS, Box, sandboxes_of

from nmoe.grading.code import verify
from nmoe.sandbox.api import Limits, Result
from nmoe.sandbox.inside import watch

SAID = b'\nkey {"passed": false, "reason": "the solution\'s process ended"}\n'
PASSED = b'\nkey {"passed": true, "reason": "all tests pass"}\n'


def result(failure: str, wall_s: float, cpu_s: float = 0.1, starved_s: float = 0.0, said: bytes = b"") -> Result:
    return Result(failure, None, said, b"", wall_s, cpu_s, starved_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("solved", "judged", "outcome"),
    [
        # It slept, or waited for what never came: nobody else had the CPUs.
        (result("timeout", 10.0), result("ok", 10.1, said=SAID), "incorrect"),
        (result("timeout", 14.0, starved_s=4.0), result("ok", 14.2, starved_s=2.0, said=SAID), "incorrect"),
        # It used up its CPU time, on a busy machine too.
        (result("timeout", 25.0, 10.0, 22.0), result("ok", 25.1, said=SAID), "incorrect"),
        (result("timeout", 0.7, 10.0), result("ok", 0.8, said=SAID), "incorrect"),
        (result("ok", 30.0), result("timeout", 30.0, 10.0, 25.0), "incorrect"),
        # It was ready to run, and others did.
        (result("timeout", 40.0, 0.5, 39.0), result("ok", 40.2, said=SAID), "error"),
        (result("timeout", 16.0, 0.5, 6.0), result("ok", 16.2, starved_s=9.0, said=SAID), "error"),
        (result("ok", 42.0), result("timeout", 42.0, 0.5, 40.0), "error"),
        # What is known in spite of the load counts.
        (result("ok", 39.0, 0.5, 38.0), result("ok", 40.0, said=PASSED), "correct"),
        (result("ok", 39.0, 0.5, 38.0), result("ok", 40.0, said=SAID), "incorrect"),
        (result("out_of_memory", 39.0, 0.5, 38.0), result("ok", 40.0, said=SAID), "incorrect"),
    ],
)
def test_whose_doing_a_deadline_is(solved: Result, judged: Result, outcome: str) -> None:
    assert (verify.LIMITS.wall_s, verify.LIMITS.cpu_s, verify.LIMITS.starved_s) == (10, 10, 30)
    verdict = verify._verdict(judged, solved, "key")
    assert (verdict.outcome, verdict.score) == (outcome, float(outcome == "correct"))
    assert ("the machine is overloaded" in verdict.reason) == (outcome == "error")


def test_cpu_time_is_reported(box: Box) -> None:
    spun = box(box.sandbox.bash("(while :; do :; done) & while :; do :; done", limits=replace(LIMITS, cpu_s=0.3)))
    assert spun.failure == "timeout"
    assert 0.25 < spun.cpu_s < 1.0


def test_sleep_is_not_starved(box: Box) -> None:
    limits = replace(LIMITS, wall_s=0.4, starved_s=5.0)
    slept = box(box.sandbox.bash("sleep 9", limits=limits))
    assert slept.failure == "timeout"
    assert slept.wall_s < 9
    unwatched = box(box.sandbox.bash("while :; do :; done", limits=replace(limits, starved_s=0.0)))
    assert (unwatched.failure, unwatched.starved_s) == ("timeout", 0.0)


@pytest.mark.long  # beside other programs it is starved, too
@pytest.mark.parametrize("parallel", ["ignored children", "threads"])
def test_crowding_oneself_out_unseen_is_not_starvation(box: Box, parallel: str) -> None:
    """More short children than CPUs, whose parent waits for a CPU meanwhile, and whose own time no process's account has."""
    code = {
        "ignored children": "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nend = time.monotonic() + 0.6\n"
        "while time.monotonic() < end:\n    for _ in range(6):\n        if os.fork() == 0:\n"
        "            while time.process_time() < 0.004: pass\n            os._exit(0)\n"
        "    try:\n        while True: os.wait()\n    except OSError: pass",
        "threads": "import hashlib, threading, time\nend = time.monotonic() + 0.6\ndata = bytes(1 << 21)\n"
        "while time.monotonic() < end:\n    all = [threading.Thread(target=hashlib.sha256, args=(data,)) for _ in range(6)]\n"
        "    for one in all: one.start()\n    for one in all: one.join()",
    }[parallel]
    result = box(box.sandbox.python(code, limits=replace(LIMITS, starved_s=9.0)))
    assert result.failure == "ok"
    assert result.starved_s < 0.5 * result.wall_s


def test_starvation_is_what_is_missing_to_one_cpu_while_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds that threads have run and waited since they began, before and after each look."""
    now: dict[str, tuple[int, int]] = {}
    ready = False

    def opened(path: str, _: str) -> io.BytesIO:
        _, _, thread, kind = path.split("/")
        if kind == "stat":
            return io.BytesIO(b"7 (a) b) %s 1" % (b"R" if ready else b"S"))
        return io.BytesIO(b"%d %d 7" % tuple(10**6 * one for one in now[thread]))

    monkeypatch.setattr(watch, "_threads", lambda: list(now))
    monkeypatch.setattr(watch, "open", opened, raising=False)
    one = watch.Starvation()

    def look(elapsed_s: float, hidden: bool = False, **threads: tuple[int, int]) -> float:
        before = one.seconds
        now.clear()
        now.update(threads)
        one.look(elapsed_s, hidden=hidden)
        return round(one.seconds - before, 6)

    assert look(1.0, a=(100, 900)) == 0.9
    assert look(1.0, a=(100, 900)) == 0.0, "it slept"
    assert look(1.0, a=(400, 1000)) == 0.1, "it waited a little, and slept"
    assert look(1.0, a=(1200, 3000), b=(1000, 2000), c=(200, 3000)) == 0.0, "three crowd one another out on two CPUs"
    assert look(1.0, a=(1400, 4000), c=(300, 3900)) == 0.7, "together they had three tenths of one; b has ended"
    assert look(1.0) == 0.0
    assert look(1.0, hidden=True, a=(100, 900)) == 0.0, "what ended unseen may have run meanwhile"
    assert look(1.0, a=(200, 1700)) == 0.8
    burst = {f"t{number}": (1, 25) for number in range(50)}
    assert look(1.0, **burst) == 0.025, "fifty that wake at once and run for a millisecond each, on two CPUs"
    ready = True
    assert look(1.0, d=(100, 900)) == 0.9
    assert look(2.0, d=(100, 900)) == 2.0, "it waits, and the kernel says so once that is over"
    assert look(1.0, d=(100, 900)) == 1.0
    ready = False
    assert look(1.0, d=(200, 4100)) == 0.2, "its wait took 3.2 s, of which 3 are counted"
    assert look(1.0, d=(200, 4100)) == 0.0
    ready = True
    assert look(1.0, d=(200, 4100)) == 0.0, "it slept, and has just woken"
    assert look(1.0, d=(200, 4100)) == 1.0


def test_cpu_time_is_that_of_the_living_as_it_grows_and_of_the_ended_as_far_as_it_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes (parent, start, own ticks, ticks of children that were waited for, nanoseconds run) before each look."""
    now: dict[str, tuple[int, int, int, int, int]] = {}
    newest = [1]

    def opened(path: str, _: str) -> io.BytesIO:
        _, _, pid, kind = path.split("/")
        parent, start, own, children, ran_ns = now[pid]
        if kind == "schedstat":
            return io.BytesIO(b"%d 0 1" % ran_ns)
        # From the state on: 1 parent, 11 and 12 own, 13 and 14 children's, 17 threads, 19 start, 21 pages.
        fields = ["R", parent, *[0] * 9, own, 0, children, 0, 0, 0, 1, 0, start, 0, 3]
        return io.BytesIO(f"{pid} (a) b) {' '.join(map(str, fields))} 0".encode())

    monkeypatch.setattr(watch, "_TICKS", 100)
    monkeypatch.setattr(watch, "_PAGE", 4096)
    monkeypatch.setattr(watch, "_pids", lambda: list(now))
    monkeypatch.setattr(watch, "_last_pid", lambda: newest[0])
    monkeypatch.setattr(watch, "open", opened, raising=False)
    usage = watch.Usage()

    def look(
        last_pid: int, reaped: dict[str, float] | None = None, **processes: tuple[int, int, int, int, int]
    ) -> float:
        before = usage.seconds
        now.clear()
        now.update({name[1:]: one for name, one in processes.items()})
        newest[0] = last_pid
        assert usage.look(reaped or {}) == 3 * 4096 * len(processes)
        return round(usage.seconds - before, 6)

    ms = 10**6
    assert look(2, p2=(1, 5, 0, 0, 4 * ms)) == 0.004, "in nanoseconds while it is young"
    assert not usage.hidden
    assert look(3, p2=(1, 5, 20, 0, 0), p3=(2, 6, 0, 0, 7 * ms)) == 0.203, "in ticks from a tenth of a second on"
    assert look(3, p2=(1, 5, 20, 0, 0)) == 0.0, "an ignored child ended: what was seen of it stays"
    assert usage.hidden
    assert look(4, p2=(1, 5, 20, 0, 0), p4=(2, 7, 0, 0, 30 * ms)) == 0.03
    assert not usage.hidden
    assert look(4, p2=(1, 5, 20, 5, 0)) == 0.02, "its parent waited for it: 50 ms, of which 30 were seen"
    assert look(9, p2=(1, 5, 20, 5, 0)) == 0.0
    assert usage.hidden, "some came and went"
    assert look(9, p2=(1, 8, 0, 0, 2 * ms)) == 0.002, "another process of the same number"
    assert look(9, reaped={"2": 0.5}) == 0.498, "the agent waited for it: half a second, of which 2 ms were seen"


@pytest.mark.skipif(os.cpu_count() == 1, reason="all else runs on the CPU that is crowded")
def test_neighbours_that_take_the_cpu_make_no_solution_wrong(
    loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen others spin on the one CPU: a right solution does not get done in a second, and is not wrong."""
    monkeypatch.setattr(verify, "LIMITS", Limits(wall_s=1.0, cpu_s=5.0, starved_s=20.0))
    tests = verify.Tests("asserts", ("assert add(1, 2) == 3",), names=("add",))
    source = "sum(range(3 * 10**6))\ndef add(a, b): return a + b"
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    neighbours: list[subprocess.Popen[bytes]] = []
    try:
        sandboxes = sandboxes_of("landlock")
        command = ["sh", "-c", "while :; do :; done"]
        neighbours += [subprocess.Popen(command, start_new_session=True) for _ in range(16)]
        verdict = loop.run(verify.verify_solution(sandboxes, tests, source))
        loop.run(sandboxes.close())
    finally:
        for one in neighbours:
            one.kill()
            one.wait()
        os.sched_setaffinity(0, before)
    assert verdict.outcome in ("correct", "error"), verdict
