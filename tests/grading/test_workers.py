"""The worker pool: deadlines, crashes, kills from outside, memory, and that nothing outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nmoe.grading.math.answers import symbolic_verdict
from nmoe.grading.workers.pool import Reply, WorkerError, WorkerPool

DEADLINE_S = 0.5


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Two workers that call `misbehave`."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [path])])
    pool = WorkerPool("misbehaviour:misbehave", 2, deadline_s=DEADLINE_S, memory_mb=512)
    yield pool
    pool.close()
    os.environ["PYTHONPATH"] = path or ""


def test_a_call_returns_what_the_function_does(pool: WorkerPool) -> None:
    assert pool.submit("return", {"a": [1, "\ud800\0"]}).result(30) == Reply("value", {"a": [1, "\ud800\0"]})


def test_a_deadline_is_the_answers_and_delays_nobody_else_by_more(pool: WorkerPool) -> None:
    pool.submit("return", 0).result(30)
    start = time.monotonic()
    hung = [pool.submit("loop", 0), pool.submit("loop", 0)]
    after = [pool.submit("return", i) for i in range(40)]
    assert [future.result(30).status for future in hung] == ["deadline", "deadline"]
    assert [future.result(30).value for future in after] == list(range(40))
    assert time.monotonic() - start < 60


def test_the_queue_and_sleep_do_not_count(pool: WorkerPool) -> None:
    """Twelve calls that each wait longer than half the deadline, in the queue and in the call, all come back."""
    futures = [pool.submit("sleep", 1.5 * DEADLINE_S) for _ in range(4)]
    assert [future.result(60) for future in futures] == [Reply("value", "slept")] * 4


@pytest.mark.parametrize("how", ["allocate", "recurse", "segfault", "abort"])
def test_what_the_answer_brings_about_is_its_own(pool: WorkerPool, how: str) -> None:
    reply = pool.submit(how, 0).result(60)
    assert reply.status == "exhausted"
    assert symbolic_verdict(reply).outcome == "incorrect"
    assert pool.submit("return", 1).result(60) == Reply("value", 1)


def test_a_worker_lost_to_something_else_is_tried_again_once(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.submit("die once", str(tmp_path / "mark")).result(60) == Reply("value", "second try")
    reply = pool.submit("die", 0).result(60)
    assert reply.status == "lost"
    assert symbolic_verdict(reply).outcome == "error"
    assert pool.submit("return", 1).result(60) == Reply("value", 1)


def test_killed_from_outside(pool: WorkerPool) -> None:
    future = pool.submit("sleep", 0.4)
    deadline = time.monotonic() + 60
    while not pool.pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    for pid in pool.pids():
        os.kill(pid, signal.SIGKILL)
    assert future.result(60) == Reply("value", "slept")


def test_a_defect_of_the_function_is_raised(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="KeyError: 'no such thing'"):
        pool.submit("raise", 0).result(30)


def test_what_the_function_prints_is_not_a_reply(pool: WorkerPool) -> None:
    assert pool.submit("print", 0).result(30) == Reply("value", "printed")


def test_an_event_loop_is_not_held_up(pool: WorkerPool) -> None:
    async def count() -> tuple[list[Reply], int]:
        calls, ticks = asyncio.gather(*(pool.call("loop", 0) for _ in range(3)), pool.call("return", 1)), 0
        while not calls.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return await calls, ticks

    replies, ticks = asyncio.run(count())
    assert [reply.status for reply in replies] == ["deadline"] * 3 + ["value"]
    assert ticks > 20  # of about 200 in the two deadlines that the three calls take


def test_a_function_that_can_not_be_imported_is_lost() -> None:
    pool = WorkerPool("no_such_module:function", 1)
    assert pool.submit(1).result(60).status == "lost"
    pool.close()


def test_closing_ends_processes_and_cancels_calls(pool: WorkerPool) -> None:
    mine = WorkerPool("time:sleep", 1)
    running, waiting = mine.submit(60), mine.submit(60)
    while not mine.pids():
        time.sleep(0.01)
    pids = mine.pids()
    mine.close()
    mine.close()
    assert running.cancelled()
    assert waiting.cancelled()
    assert not any(_alive(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        mine.submit(1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_worker_outlives_a_killed_parent() -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import time
                from nmoe.grading.workers.pool import WorkerPool
                pool = WorkerPool("time:sleep", 2)
                calls = [pool.submit(0), pool.submit(300), pool.submit(300)]
                calls[0].result()
                def forked():
                    paths = [f"/proc/{pid}/task/{pid}/children" for pid in pool.pids()]
                    return [child for path in paths for child in open(path).read().split()]
                seen = []
                # The child of the first call may still be listed while it ends.
                while len(seen) != 2 or forked() != seen:
                    seen = forked()
                    time.sleep(0.2)
                print(*pool.pids(), *seen, flush=True)
                input()
            """),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 4, "two workers, and what each has forked"
    assert all(_alive(pid) for pid in pids)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
