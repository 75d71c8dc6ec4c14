"""Measures the traffic of expert parallelism: the bytes of rows that a rank sends, and the time of their exchanges."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank or several ranks.

    `sent_bytes` counts rows that were sent to other ranks, forward and backward. `seconds` is the time in exchanges of
    the rank that waited longest; on a GPU, the time to start them.
    """

    sent_bytes: int = 0
    seconds: float = 0.0

    def beside(self, other: Traffic) -> Traffic:
        """Returns the sum with another rank's traffic in the same period: bytes are added, and the longer time counts."""
        return Traffic(self.sent_bytes + other.sent_bytes, max(self.seconds, other.seconds))

    def then(self, other: Traffic) -> Traffic:
        """Returns the sum with traffic of a later period: bytes and seconds are added."""
        return Traffic(self.sent_bytes + other.sent_bytes, self.seconds + other.seconds)


class Meter:
    """Measures the traffic of one rank."""

    def __init__(self) -> None:
        self._now = Traffic()

    @contextmanager
    def exchange(self, send: Sequence[int], own: int, row_bytes: int) -> Iterator[None]:
        """Measures the exchange in the `with` block, which sends `send[i]` rows to rank i of the group; `own` is this
        process's rank."""
        began = time.perf_counter()
        yield
        sent_bytes = (sum(send) - send[own]) * row_bytes
        self._now = self._now.then(Traffic(sent_bytes, time.perf_counter() - began))

    def taken(self) -> Traffic:
        """Returns the traffic since the last call."""
        taken, self._now = self._now, Traffic()
        return taken
