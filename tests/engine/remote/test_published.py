"""Publications to stand-ins for servers: which requests wait, how long, and what becomes of a server that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tiny_models import DENSE, peaked_model

from nmoe.engine.api import Request
from nmoe.engine.remote.process import RunningServer
from nmoe.engine.remote.published import PublishedFleet
from nmoe.engine.remote.server import EngineServer, ServerLostError
from nmoe.engine.remote.weights import Update
from nmoe.errors import InfrastructureError
from nmoe.model.config import ModelConfig
from nmoe.rl.engines import Frozen
from nmoe.types import Sample, Sampling

ASKED = Request((1,), 1, Sampling(1), "asked")


async def at_once(request: Request, deadline_s: float | None) -> None:
    pass


@dataclass
class Scene:
    """What the stand-ins of a test do. Those `away` answer nothing, the others a request for tokens once `answer` has returned.
    `taken` are the names and versions of weights that they took."""

    away: set[str] = field(default_factory=set)
    taken: list[tuple[str, int]] = field(default_factory=list)
    answer: Callable[[Request, float | None], Awaitable[None]] = at_once
    notes: list[str] = field(default_factory=list)


class StandIn(EngineServer):
    """A server that samples one token."""

    scene: Scene

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.version = 0

    async def info(self) -> dict[str, Any]:
        self._reached()
        return {"weight_version": str(self.version)}

    async def control(self, path: str, body: Any = None, params: Any = None, size: int = 0) -> None:
        self._reached()
        if path == "/finish_weight_update":
            self.version = int(body["weight_version"])
            self.scene.taken.append((self.name, self.version))

    async def generate(
        self,
        request: Request,
        version: int | None,
        attempt: int,
        deadline_s: float | None,
        newest: Callable[[], int | None] = lambda: None,
    ) -> list[Sample]:
        self._reached()
        await self.scene.answer(request, deadline_s)
        self._reached()
        return [Sample([1], [-1.0], [self.version], "length") for _ in range(request.samples)]

    def _reached(self) -> None:
        if self.name in self.scene.away:
            raise ServerLostError(f"{self.name} is away")


class Same:
    """A canary that every server passes."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = [(1,)]
        self.tokens = 1

    def difference(self, sampled: Sequence[tuple[tuple[int, ...], Sample]]) -> tuple[float, float]:
        return 0.0, 1.0

    def bound(self) -> float:
        return 1.0

    def more_prompts(self) -> bool:
        return False


@contextmanager
def opened(scene: Scene, count: int = 1, **settings: Any) -> Iterator[PublishedFleet]:
    """Opens a fleet of stand-ins, `http://0` and so on, to which nothing was published yet."""
    source = Frozen(peaked_model(ModelConfig(**DENSE), 0), None)
    fleet = PublishedFleet(
        [RunningServer(f"http://{number}") for number in range(count)],
        source,
        source.model.config,
        Same(),
        format="nmoe",
        token_s=1.0,
        key="",
        note=scene.notes.append,
        speaks=type("Server", (StandIn,), {"scene": scene}),
        **settings,
    )
    fleet._prepared = lambda source, format, version: Update(version, {"transport": "disk", "digests": []}, 1, None, 1)
    with fleet:
        yield fleet


def published_to(fleet: PublishedFleet, version: int) -> None:
    fleet.run(fleet.update_weights(None, version))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def ended(task: asyncio.Task[list[Sample]]) -> list[Sample]:
    return await task


def test_a_request_that_waits_for_a_heal_waits_through_a_publication() -> None:
    """The publication ends the heal of the only server, and opens the server itself."""
    scene = Scene()
    with opened(scene, wait_s=900.0) as fleet:
        published_to(fleet, 1)
        scene.away.add("http://0")

        async def begun() -> asyncio.Task[list[Sample]]:
            task = asyncio.create_task(fleet.generate(ASKED))
            await until(lambda: len(fleet._waiting) == 1 and fleet._slots[0].healing is not None)
            scene.away.clear()
            return task

        task = fleet.run(begun())
        published_to(fleet, 2)
        (sample,) = fleet.run(ended(task))
        assert sample.versions == [2]
        assert scene.notes == ["engine http://0 is fenced: http://0 is away"]


def test_a_server_that_is_away_at_the_start_is_healed_when_others_have_started_it() -> None:
    scene = Scene(away={"http://1"})
    with opened(scene, 2, wait_s=0.05) as fleet:
        assert scene.notes == ["engine http://1 is fenced: http://1 is away"]
        scene.away.clear()
        published_to(fleet, 1)
        assert fleet.metrics()["engines_serving"] == 2
        assert sorted(scene.taken) == [("http://0", 1), ("http://1", 1)]


def test_a_run_whose_servers_are_all_away_can_be_started_again() -> None:
    message = "no engine is left to sample with: http://0: http://0 is away"
    with pytest.raises(InfrastructureError, match=message), opened(Scene(away={"http://0"}), wait_s=0.05):
        pass
