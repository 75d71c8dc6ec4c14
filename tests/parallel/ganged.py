"""What each rank of test_gang.py runs: joins, and then does what the case asks for."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from nmoe.errors import UserError
from nmoe.parallel import join as joining
from nmoe.parallel.gang import Controller, Member, collect, command, everywhere, gang
from nmoe.parallel.join import join, leave
from nmoe.parallel.ranks import Ranks
from nmoe.recipes.setup import refuse_other_weights

# As torch keeps process groups in caches of its own.
kept: list[object] = []


class Counter:
    """Something that each rank has its own of."""

    def __init__(self, start: int, other: Counter | None = None) -> None:
        self.value, self.other = start + gang().rank, other

    def add(self, function: Callable[[int], int], share: int) -> int:
        self.value += function(share)
        return self.value

    @command
    def double(self) -> int:
        self.value *= 2
        return self.value

    def total(self, share: None) -> int:
        """A collective, and an object that another command made."""
        assert self.other is not None
        sum_ = torch.tensor(self.value + self.other.value)
        dist.all_reduce(sum_)
        return int(sum_)

    def fail(self, share: str) -> None:
        if share == "mistake":
            kept.append(dist.group.WORLD)
            raise UserError("config.toml:3: wrong")
        if share == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def made(self, share: None) -> int:
        """How many objects a member holds."""
        here = gang()
        return len(here._made) if isinstance(here, Member) else 0


def adds(amount: int) -> Callable[[int], int]:
    """A function within a function, as the losses are."""
    return lambda share: share + amount


def works() -> None:
    first = everywhere(Counter, 10)
    second = everywhere(Counter, 100, first)
    grown = [10 + 1 + 5, 11 + 2 + 5]

    def grow(share: int) -> int:
        return share + 5

    assert collect(partial(first.add, adds(5)), [1, 2]) == grown
    assert collect(partial(first.add, grow), [1, 2]) == [16 + 6, 18 + 7]
    assert first.double() == 44  # this rank's own
    assert collect(second.total, [None, None]) == [44 + 100 + 50 + 101] * 2
    assert everywhere(adds, 3) is not None
    held = collect(second.made, [None, None])[1]
    for number in range(50):
        everywhere(Counter, number)
    assert collect(second.made, [None, None])[1] <= held + 2  # what the controller forgot, members forget


def reads() -> None:
    """Each rank is a machine of its own, with a directory of its own."""
    place = os.environ
    place["LOCAL_WORLD_SIZE"] = "1"
    refuse_other_weights(Path(sys.argv[2]) / place["RANK"], Ranks())


def main(case: str) -> None:
    if case == "waits":
        joining._PATIENCE_S, joining.DEADLINE = 3.0, timedelta(seconds=6)
    here = join(sys.argv[1:])
    if isinstance(here, Member):
        code = here.serve()
        leave()
        if code:
            here.outlast()
        sys.exit(code)
    assert isinstance(here, Controller)
    if case in ("works", "reads"):
        works() if case == "works" else everywhere(reads)
        here.close(0)
        leave()
        return
    counter = everywhere(Counter, 0)
    began = time.monotonic()
    try:
        collect(counter.fail, ["", case])
    finally:
        print(f"{time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
