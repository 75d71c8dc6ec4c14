"""How many rows a stage leaves and how long their prompts are, without keeping the rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 95, 99, 99.5)


class Lengths:
    """A histogram of lengths: exact percentiles in the memory of the longest length."""

    def __init__(self) -> None:
        self._counts = np.zeros(1024, dtype=np.int64)

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Counts these lengths, each at least 0."""
        counts = np.bincount(lengths, minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def summary(self) -> dict[str, float]:
        """`{"mean": 210.4, "p50": 181, ..., "max": 5210}`; empty where nothing was counted. A percentile is the least length that
        at least this share of the rows do not exceed."""
        total = int(self._counts.sum())
        if total == 0:
            return {}
        below = np.cumsum(self._counts)
        mean = float(np.arange(len(self._counts)) @ self._counts) / total
        at = {f"p{one:g}": int(np.searchsorted(below, one / 100 * total - 1e-9)) for one in PERCENTILES}
        return {"mean": round(mean, 1), **at, "max": int(np.flatnonzero(self._counts)[-1])}


class Stage:
    """What is left after one filter: `Stage("clean integer answer", in_tokens=False)`."""

    def __init__(self, name: str, in_tokens: bool) -> None:
        self.name = name
        self.rows = 0
        self._lengths = {"chars": Lengths()} | ({"tokens": Lengths()} if in_tokens else {})

    def add(self, lengths: dict[str, NDArray[np.int64]]) -> None:
        """Counts rows by the lengths of their prompts in each unit."""
        self.rows += len(lengths["chars"])
        for unit, counted in self._lengths.items():
            counted.add(lengths[unit])

    def summary(self) -> dict[str, object]:
        """As the manifest has it."""
        return {"stage": self.name, "rows": self.rows} | {
            f"prompt_{unit}": counted.summary() for unit, counted in self._lengths.items()
        }
