"""Both levels of sandbox, opened once; a level that this machine cannot have skips its tests and says why."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from boxes import LEVELS, Box, sandboxes_of

from nmoe.sandbox.sandboxes import Sandboxes

T = TypeVar("T")


@pytest.fixture(scope="session", params=LEVELS)
def sandboxes(request: pytest.FixtureRequest) -> Sandboxes:
    return sandboxes_of(request.param)


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


class _Box:
    def __init__(self, runner: asyncio.Runner, sandboxes: Sandboxes) -> None:
        self._runner = runner
        self.sandbox = runner.run(sandboxes.open())

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)


@pytest.fixture
def box(sandboxes: Sandboxes, loop: asyncio.Runner) -> Iterator[Box]:
    """A sandbox of its own for one test."""
    opened = _Box(loop, sandboxes)
    yield opened
    loop.run(opened.sandbox.close())


@pytest.fixture(scope="session")
def shared_box(sandboxes: Sandboxes, loop: asyncio.Runner) -> Iterator[Box]:
    """One sandbox for the many attempts that must change nothing in it."""
    opened = _Box(loop, sandboxes)
    yield opened
    loop.run(opened.sandbox.close())


@pytest.fixture(scope="session")
def graders() -> Iterator[Sandboxes]:
    """Sandboxes of one level, for graders: what the levels hold is tested on all of them."""
    opened = sandboxes_of("bubblewrap" if shutil.which("bwrap") else "landlock", warm=2)
    yield opened
    asyncio.run(opened.close())
