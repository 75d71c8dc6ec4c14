"""Orders of problems: an endless sequence that is a pure function of the position and therefore has no state."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nmoe.types import Problem

_SPLIT_ONE_IN = 8


class Order(Protocol):
    """The sequence that a pool walks along.

    `at` returns the same problem for the same position in every process, at any time. `size` is the number of problems before
    the first one repeats, None if unknown. `fingerprint` differs between orders that differ at any position, so that a saved
    position is not applied to another order. `read_as` describes which fields were read as question and gold, for pools of
    records.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def read_as(self) -> str: ...

    def at(self, position: int) -> Problem: ...


def stable_hash(*parts: object) -> int:
    """Hashes the parts to 64 bits. Python's own `hash` differs from process to process."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def split_by(*parts: object) -> str:
    """Returns a question's split by a hash of its parts: "eval" for one in eight, "validation" for one in eight, else "train".

    "eval" is for held-out figures; "validation" is for decisions, such as when a run may end.
    """
    return {0: "eval", 1: "validation"}.get(stable_hash("split", *parts) % _SPLIT_ONE_IN, "train")


def fingerprint_of(*parts: Any) -> str:
    """Hashes the parts to 16 hexadecimal digits."""
    return f"{stable_hash(*parts):016x}"


class Shuffled:
    """Cycles through `size` problems, in a new order each epoch.

    The permutation of an epoch is seeded by (seed, epoch): positions [e * size, (e + 1) * size) hold every problem exactly
    once.
    """

    def __init__(
        self, name: str, size: int, problem: Callable[[int], Problem], seed: int, content: str, read_as: str = ""
    ) -> None:
        """`problem(i)` is the i-th of `size` problems; `content` represents all of them in the fingerprint."""
        self.read_as = read_as
        self.name = name
        self.size = size
        self.fingerprint = fingerprint_of("shuffled", size, seed, content)
        self._problem = problem
        self._seed = seed
        self._epoch = -1
        self._permutation: Sequence[int] = ()

    def at(self, position: int) -> Problem:
        epoch, index = divmod(position, self.size)
        if epoch != self._epoch:
            self._permutation = self._permute(epoch)
            self._epoch = epoch
        return self._problem(self._permutation[index])

    def _permute(self, epoch: int) -> list[int]:
        permutation = list(range(self.size))
        random.Random(stable_hash("epoch", self._seed, epoch)).shuffle(permutation)
        return permutation


class EasyFirst(Shuffled):
    """The same, but the first epoch goes from the easiest problem to the hardest; equally hard ones stay shuffled."""

    def __init__(
        self,
        name: str,
        difficulties: Sequence[float],
        problem: Callable[[int], Problem],
        seed: int,
        content: str,
        read_as: str = "",
    ) -> None:
        """`difficulties[i]` is that of the i-th problem."""
        super().__init__(name, len(difficulties), problem, seed, fingerprint_of(content, *difficulties), read_as)
        self._difficulties = difficulties

    def _permute(self, epoch: int) -> list[int]:
        permutation = super()._permute(epoch)
        return sorted(permutation, key=self._difficulties.__getitem__) if epoch == 0 else permutation
