"""Deals requests over workers that sample: each goes to the worker with the fewest tokens left to sample, as expected."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from nmoe.engine.api import Request

# The expected length of a sample is the mean over this many finished ones.
_RECENT = 512


class Dealing:
    """The work that each of several workers has left, in expected tokens."""

    def __init__(self, workers: int) -> None:
        self.left = [0.0] * workers
        self._lengths: deque[int] = deque(maxlen=_RECENT)

    def choose(self, among: Collection[int], request: Request, preferred: int | None = None) -> int:
        """Returns the worker with the least left to sample; the preferred one, if it has no more left than that and one such
        request beside."""
        least = min(among, key=lambda worker: self.left[worker])
        if preferred in among and preferred is not None:
            slack = sum(self._expected(request))
            return preferred if self.left[preferred] <= self.left[least] + slack else least
        return least

    @contextmanager
    def dealt(self, worker: int, request: Request) -> Iterator[Callable[[int], None]]:
        """Counts a request as the worker's while the block runs. Yields a function to call with the length of each finished
        sample."""
        expected = self._expected(request)
        self.left[worker] += sum(expected)

        def finished(tokens: int) -> None:
            self.left[worker] -= expected.pop()
            self._lengths.append(tokens)

        try:
            yield finished
        finally:
            self.left[worker] -= sum(expected)

    def _expected(self, request: Request) -> list[float]:
        mean = sum(self._lengths) / len(self._lengths) if self._lengths else request.sampling.max_new_tokens / 2
        return [mean] * request.samples
