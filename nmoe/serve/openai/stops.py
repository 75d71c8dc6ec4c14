"""Finds stop strings in a text that grows, and holds back what may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Cuts a text, given piece by piece, before the first stop string in it.

    `found` is the stop string that ended the text, None so far. Of several that end at the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._longest = len(self._stops[0]) if self._stops else 0
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Adds a piece, and returns the text that is sure to be no part of a stop string."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else text
        if (said := self.cut(text)) is not None:
            return said
        held = self._held + text
        keep = min(self._longest - 1, len(held))
        while keep and not any(stop.startswith(held[len(held) - keep :]) for stop in self._stops):
            keep -= 1
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def cut(self, text: str) -> str | None:
        """Adds a piece that completes a stop string, and returns the text before it; None for another piece, which is not added."""
        held = self._held + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if not ends:
            return None
        end, _, self.found = min(ends)
        self._held = ""
        return held[: end if self._include else end - len(self.found)]

    def flush(self) -> str:
        """Ends the text: returns the text that was held back."""
        held, self._held = self._held, ""
        return held
