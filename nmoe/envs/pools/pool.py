"""The order in which problems come, and the pool that hands out one rank's share of it. The position in an order is part of a
checkpoint.

An order is an endless sequence of problems, a pure function of the position, and therefore has no state. A mixture interleaves
several.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

from nmoe.errors import UserError
from nmoe.types import Problem

_SPLIT_ONE_IN = 8


class Order(Protocol):
    """An endless sequence of problems, from which a pool hands out problems by position.

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
    """Returns the split of a question by a hash of `parts`: "eval" for one question in eight, "validation" for another eighth, else
    "train".

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
        """Makes the order. `problem(i)` returns the i-th of `size` problems; `content` is a fingerprint of all of them."""
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
    """Cycles through problems: in the first epoch from the easiest to the hardest (equally hard ones shuffled), later in a new
    random order each epoch.
    """

    def __init__(
        self,
        name: str,
        difficulties: Sequence[float],
        problem: Callable[[int], Problem],
        seed: int,
        content: str,
        read_as: str = "",
    ) -> None:
        """Makes the order. `difficulties[i]` is the difficulty of the i-th problem; higher is harder."""
        super().__init__(name, len(difficulties), problem, seed, fingerprint_of(content, *difficulties), read_as)
        self._difficulties = difficulties

    def _permute(self, epoch: int) -> list[int]:
        permutation = super()._permute(epoch)
        return sorted(permutation, key=self._difficulties.__getitem__) if epoch == 0 else permutation


_MODULUS = 2**64
_STEP = 0x9E3779B97F4A7C15


class Mixture:
    """Interleaves several orders by weight, evenly and deterministically.

    Position p goes to the source whose interval of [0, 2**64) contains the p-th point of a golden-ratio (Weyl) sequence,

        point(p) = (offset(seed) + p * STEP) mod 2**64,   STEP = 2**64 / golden ratio, rounded to odd.

    The sequence fills every interval in proportion to its length with an error that grows like the logarithm of p; the error of
    independent draws grows like the square root. A million problems match their weights to within a few problems. Unlike in a
    fixed cycle (ABABAB), every n-th point fills the interval too, so that no place in a batch gets a single source. A source's
    position is the number of earlier positions of the mixture that went to it.

    References: H. Weyl, Über die Gleichverteilung von Zahlen mod. Eins (1916); Knuth, TAOCP vol. 3, section 6.4, on the golden
    ratio.
    """

    def __init__(self, name: str, sources: Sequence[Order], weights: Sequence[float], seed: int) -> None:
        """Makes a mixture of these orders. `weights` are positive and need not sum to 1."""
        self.name = name
        self.size = None
        self.read_as = "; ".join(source.read_as for source in sources if source.read_as)
        self.fingerprint = fingerprint_of("mixture", seed, *weights, *(source.fingerprint for source in sources))
        self.sources = sources
        self._offset = stable_hash("mixture", seed)
        total = sum(map(Fraction, weights))
        shares = [0, *(round(reached / total * _MODULUS) for reached in accumulate(map(Fraction, weights)))]
        self._shares = list(pairwise(shares))

    def at(self, position: int) -> Problem:
        point = (self._offset + position * _STEP) % _MODULUS
        source = next(i for i, (low, high) in enumerate(self._shares) if low <= point < high)
        return self.sources[source].at(self.count(source, position))

    def count(self, source: int, positions: int) -> int:
        """Counts how many of the first `positions` positions go to `source`, in time logarithmic in `positions`.

        A point x lies in [low, high) exactly when floor((x - low) / M) - floor((x - high) / M) is 1; otherwise it is 0.
        Leaving x unreduced adds the same to both terms, so that the count is a difference of two floor sums.
        """
        low, high = (floor_sum(positions, _MODULUS, _STEP, self._offset - bound) for bound in self._shares[source])
        return low - high


def floor_sum(n: int, modulus: int, step: int, start: int) -> int:
    """Computes the sum of floor((start + i * step) / modulus) for i in [0, n), by the Euclidean algorithm.

    It counts lattice points under a line: Graham, Knuth and Patashnik, Concrete Mathematics, section 3.5.
    """
    total = 0
    while n > 0:
        quotient, start = divmod(start, modulus)
        total += quotient * n
        quotient, step = divmod(step, modulus)
        total += quotient * (n * (n - 1) // 2)
        # The remaining points lie under a line with slope and offset below 1; swap the axes and count them by the other coordinate.
        height = start + step * n
        n, start = divmod(height, modulus)
        modulus, step = step, modulus
    return total


# If so many problems in a row of an endless pool do not fit, none is expected to.
_GIVE_UP = 10_000


class Drawn(NamedTuple):
    """A problem and its position in the order: `Drawn(position=128, problem=...)`.

    A problem repeats in a later epoch, a position never does: sampling seeds derive from it.
    """

    position: int
    problem: Problem


class Pool:
    """Hands out the problems of an order, endlessly. The next problem depends only on the order and on the saved state.

    `state()` is JSON-able: {"fingerprint": "9c1b...", "taken": 128}.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.passed_over = 0  # problems skipped since this pool was made, because they did not fit
        self._taken = 0
        self._fits: Callable[[Problem], bool] | None = None

    def keep(self, fits: Callable[[Problem], bool]) -> None:
        """Makes `take` and `draw` skip problems for which `fits` returns False.

        `fits` must be a pure function of the problem, so that a resumed run draws the same problems.
        """
        self._fits = fits

    @property
    def name(self) -> str:
        return self.order.name

    @property
    def size(self) -> int | None:
        """The number of problems before the first one repeats; None for an endless pool."""
        return self.order.size

    def take(self, n: int) -> list[Problem]:
        """Returns the next `n` problems that fit. Raises UserError if none fits."""
        return [drawn.problem for drawn in self.draw(n)]

    def draw(self, n: int, admit: Callable[[Drawn], bool] = lambda drawn: True) -> list[Drawn]:
        """Returns the next `n` problems that fit and for which `admit` returns True, with their positions in the order.

        Raises UserError if none fits.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} problems")
        found: list[Drawn] = []
        in_a_row = 0
        while len(found) < n:
            position = self._taken
            problem = self.order.at(position)
            self._taken += 1
            if self._fits is None or self._fits(problem):
                if admit(drawn := Drawn(position, problem)):
                    found.append(drawn)
                in_a_row = 0
                continue
            self.passed_over += 1
            in_a_row += 1
            if in_a_row > (self.size or _GIVE_UP):
                raise UserError(f"pool {self.name!r}: none of {in_a_row} problems in a row fits the model's context")
        return found

    def state(self) -> dict[str, Any]:
        return {"fingerprint": self.order.fingerprint, "taken": self._taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state` was saved. Raises UserError for the state of another pool, and then changes nothing."""
        if state.get("fingerprint") != self.order.fingerprint:
            raise UserError(
                f"the saved position belongs to another pool than {self.name!r}: its settings or its data have changed; "
                "restore them, or start a new run"
            )
        taken = state.get("taken")
        if not isinstance(taken, int) or isinstance(taken, bool) or taken < 0:
            raise UserError(f"the saved position of pool {self.name!r} is {taken!r}, which is not a number of problems")
        self._taken = taken
