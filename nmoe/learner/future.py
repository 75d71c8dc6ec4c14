"""What a primitive returns: its result, now or later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Future(Protocol[R_co]):
    """`result()` waits for the primitive and returns what it gave."""

    def result(self) -> R_co: ...


@dataclass(frozen=True)
class Done(Generic[R]):
    """A future whose primitive ran at once, as every primitive of a single process does."""

    value: R

    def result(self) -> R:
        return self.value
