"""A pool: one rank's walk along an order of problems, with a position that is part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nmoe.envs.pools.order import Order
from nmoe.errors import UserError
from nmoe.types import Problem

# If so many problems in a row of an endless pool do not fit, none is expected to.
_GIVE_UP = 10_000


@dataclass(frozen=True)
class Shard:
    """One rank's share: rank `rank` of `world_size` gets the positions rank, rank + world_size, ... of the shared order."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must lie in [0, world_size), got rank {self.rank} of {self.world_size}")


class Drawn(NamedTuple):
    """A problem and its position in the order: `Drawn(position=128, problem=...)`.

    A problem repeats in a later epoch, a position never does: sampling seeds derive from it.
    """

    position: int
    problem: Problem


class Pool:
    """Hands out the problems of one shard, endlessly; the next problem depends on the order and the state alone.

    `state()` is JSON-able: {"fingerprint": "9c1b...", "rank": 0, "world_size": 1, "taken": 128}.
    """

    def __init__(self, order: Order, shard: Shard) -> None:
        self.order = order
        self.shard = shard
        self.passed_over = 0  # problems skipped since this pool was made, because they did not fit
        self._taken = 0
        self._fits: Callable[[Problem], bool] | None = None

    def keep(self, fits: Callable[[Problem], bool]) -> None:
        """Makes `take` skip problems that do not fit.

        `fits` must be a pure function of the problem, so that a resumed run draws the same problems.
        """
        self._fits = fits

    @property
    def name(self) -> str:
        return self.order.name

    @property
    def size(self) -> int | None:
        """The number of problems in all shards before the first one repeats; None for an endless pool."""
        return self.order.size

    def take(self, n: int) -> list[Problem]:
        """Returns the next `n` problems of this shard that fit. Raises UserError if none fits."""
        return [drawn.problem for drawn in self.draw(n)]

    def draw(self, n: int, admit: Callable[[Drawn], bool] = lambda drawn: True) -> list[Drawn]:
        """Returns the next `n` problems of this shard that fit and that `admit` accepts, with their positions in the shared
        order.

        Raises UserError if none fits.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} problems")
        found: list[Drawn] = []
        in_a_row = 0
        while len(found) < n:
            position = self.shard.rank + self._taken * self.shard.world_size
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
        return {"fingerprint": self.order.fingerprint, **self._shard_state(), "taken": self._taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state` was saved. Raises UserError for the state of another pool or shard, and then changes nothing."""
        if state.get("fingerprint") != self.order.fingerprint:
            raise UserError(
                f"the saved position belongs to another pool than {self.name!r}: its settings or its data have changed; "
                "restore them, or start a new run"
            )
        saved_shard = {key: state.get(key) for key in self._shard_state()}
        if saved_shard != self._shard_state():
            raise UserError(
                f"the saved position of pool {self.name!r} is that of rank {saved_shard['rank']} of "
                f"{saved_shard['world_size']}, and this is rank {self.shard.rank} of {self.shard.world_size}; resume "
                "with the same number of ranks"
            )
        taken = state.get("taken")
        if not isinstance(taken, int) or isinstance(taken, bool) or taken < 0:
            raise UserError(f"the saved position of pool {self.name!r} is {taken!r}, which is not a number of problems")
        self._taken = taken

    def _shard_state(self) -> dict[str, int]:
        return {"rank": self.shard.rank, "world_size": self.shard.world_size}
