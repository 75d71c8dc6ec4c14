"""Runs of examples that are asked to stop at a step, and what of their metrics has to come out the same again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nmoe.recipes import run_loop
from nmoe.recipes.run_loop import Interruptible


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """A run within is asked to stop during its step of this number, and does so with a KeyboardInterrupt."""
    steps = 0

    class Interrupted(Interruptible):
        @property
        def requested(self) -> bool:  # type: ignore[override]
            nonlocal steps
            steps += 1  # the loop asks once a step
            return steps >= step

        @requested.setter
        def requested(self, value: bool) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_loop, "Interruptible", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics but for times and speeds."""
    return [{name: row[name] for name in row if "time" not in name and "per_second" not in name} for row in rows]
