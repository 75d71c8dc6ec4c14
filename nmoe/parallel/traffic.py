"""The traffic of expert groups: the bytes of the rows that leave a rank, and the time that their exchanges take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank or several: `sent_bytes` of rows that went to other ranks, forward and backward, and the `seconds`
    that the rank which waited longest spent in the exchanges. On a GPU these are the seconds to start them."""

    sent_bytes: int = 0
    seconds: float = 0.0

    def beside(self, other: Traffic) -> Traffic:
        """Adds the traffic of another rank at the same time."""
        return Traffic(self.sent_bytes + other.sent_bytes, max(self.seconds, other.seconds))

    def then(self, other: Traffic) -> Traffic:
        """Adds the traffic of a later time."""
        return Traffic(self.sent_bytes + other.sent_bytes, self.seconds + other.seconds)


class Meter:
    """Counts the traffic of one rank."""

    def __init__(self) -> None:
        self._now = Traffic()

    @contextmanager
    def exchange(self, send: Sequence[int], own: int, row_bytes: int) -> Iterator[None]:
        """Measures an exchange that sends `send[i]` rows to the group's rank i; this process is rank `own`."""
        began = time.perf_counter()
        yield
        sent_bytes = (sum(send) - send[own]) * row_bytes
        self._now = self._now.then(Traffic(sent_bytes, time.perf_counter() - began))

    def taken(self) -> Traffic:
        """The traffic since the last call."""
        taken, self._now = self._now, Traffic()
        return taken
