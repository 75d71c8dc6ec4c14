"""The gang: objects on every rank, shares, functions by value; and what becomes of it where a rank raises, dies or is another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from nmoe.parallel.gang import collect, command, everywhere, gang

SCRIPT = Path(__file__).with_name("ganged.py")


def ranks(*cases: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each rank; every rank has its own arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank, case in enumerate(cases):
        place = {"RANK": str(rank), "WORLD_SIZE": str(len(cases)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *case.split()],
                env=os.environ | place | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [one.communicate(timeout=120) for one in started]
    return [(one.returncode, *texts) for one, texts in zip(started, said, strict=True)]


def test_two_ranks_work_for_one_controller() -> None:
    for code, _, err in ranks("works", "works"):
        assert code == 0, err[-3000:]


def test_what_a_rank_raises_is_told_by_the_controller() -> None:
    (code, out, err), (other, _, _) = ranks("mistake", "mistake")
    assert (code, other) == (2, 2)
    assert "error: rank 1: config.toml:3: wrong" in err
    assert float(out.split()[0]) < 30


def test_a_killed_rank_ends_the_others() -> None:
    (code, out, err), (other, _, _) = ranks("kill", "kill")
    assert (code, other) == (1, -9)
    assert "error: rank 1 has ended without a word: it was killed, or out of memory" in err
    assert float(out.split()[0]) < 30


def test_ranks_that_differ_are_refused() -> None:
    (code, _, err), (other, _, quiet) = ranks("works", "works --run.seed=2")
    assert (code, other) == (2, 2), (err, quiet)
    assert "error: rank 1 has other arguments than rank 0" in err
    assert not any(line.startswith("error") for line in quiet.splitlines()), quiet


def test_one_process_is_a_gang_of_one() -> None:
    class Doubler:
        @command
        def double(self, number: int) -> int:
            return 2 * number

    assert gang().size == 1
    assert everywhere(int, "7") == 7
    assert collect(lambda share: share + 1, [3]) == [4]
    assert Doubler().double(4) == 8
