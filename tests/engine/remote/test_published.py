"""Publications to stand-ins for servers: which requests wait, how long, and what becomes of a server that is away."""

from __future__ import annotations

import asyncio
import threading
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
from nmoe.engine.remote.weights import Format, Update
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

    async def refuse_sleep(self) -> None:
        self._reached()

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


async def begun(fleet: PublishedFleet, *requests: Request) -> list[asyncio.Task[list[Sample]]]:
    """Has a fleet sample requests, and returns once each of them runs or waits."""
    before = fleet._requests + len(fleet._waiting)
    tasks = [asyncio.create_task(fleet.generate(one)) for one in requests]
    await until(lambda: fleet._requests + len(fleet._waiting) == before + len(requests))
    return tasks


async def all_of(tasks: list[asyncio.Task[list[Sample]]]) -> list[list[Sample]]:
    return await asyncio.gather(*tasks)


def test_the_deadline_of_a_canary_follows_from_the_longest_request_that_runs_there() -> None:
    """A full server samples what it has first; it may take as long as its requests may."""
    deadlines: dict[str, float | None] = {}
    free = asyncio.Event()

    async def answer(request: Request, deadline_s: float | None) -> None:
        deadlines[request.request_id.split("/")[0]] = deadline_s
        if not request.request_id.startswith("canary"):
            await free.wait()

    with opened(Scene(answer=answer)) as fleet:
        published_to(fleet, 1)
        assert deadlines == {"canary": 60.0 + 1}
        short, long = (Request((1,), 1, Sampling(tokens), f"{tokens}") for tokens in (5, 30))
        tasks = fleet.run(begun(fleet, short, long))
        published_to(fleet, 2)
        assert deadlines == {"5": 60.0 + 5, "30": 60.0 + 30, "canary": 60.0 + 1 + 30}
        fleet.run(freed(free))
        fleet.run(all_of(tasks))
        published_to(fleet, 3)
        assert deadlines["canary"] == 60.0 + 1


async def freed(event: asyncio.Event) -> None:
    event.set()


def test_requests_wait_for_room_for_all_their_samples_and_the_first_goes_first() -> None:
    """Of four places one is left: it waits for the group of three, which is first, though others would fit."""
    gates: dict[str, asyncio.Event] = {}
    order: list[str] = []

    async def answer(request: Request, deadline_s: float | None) -> None:
        if not request.request_id.startswith("canary"):
            order.append(request.request_id)
            await gates.setdefault(request.request_id, asyncio.Event()).wait()

    def asked(name: str, samples: int, place: int) -> Request:
        return Request((1,), samples, Sampling(1), name, order=place)

    async def main(fleet: PublishedFleet) -> None:
        names = [("a", 2), ("b", 1), ("old", 1), ("c", 3), ("d", 9), ("e", 1), ("f", 1)]
        requests = [asked(name, samples, place) for place, (name, samples) in enumerate(names)]
        tasks = await begun(fleet, *requests[:2], *requests[3:])
        (old,) = await begun(fleet, requests[2])
        assert order == ["a", "b", "old"], "an older one that fits does not wait for younger ones"
        (ended_early,) = await begun(fleet, asked("ended", 2, -1))
        ended_early.cancel()
        for name in ("old", "b"):
            gates[name].set()
        await until(lambda: fleet._requests == 1)
        await asyncio.sleep(0.02)
        assert order == ["a", "b", "old"], "two are free, and the first wants three"
        for name, then in [("a", "c"), ("c", "d"), ("d", "ef")]:
            gates[name].set()
            await asyncio.sleep(0.02)
            assert order[-len(then) :] == [*then], "the one of nine is alone"
        for name in "ef":
            gates[name].set()
        await all_of([*tasks, old])

    with opened(Scene(answer=answer), most=4) as fleet:
        published_to(fleet, 1)
        fleet.run(main(fleet))


def test_a_server_that_hangs_in_a_publication_holds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server takes no weights until the second one has sampled by the new ones."""
    served, hangs = asyncio.Event(), asyncio.Event()
    control = StandIn.control

    async def hanging(self: StandIn, path: str, *rest: Any, **more: Any) -> None:
        if self.name == "http://0" and path == "/update_weights" and hangs.is_set():
            await asyncio.wait_for(served.wait(), 20)
            hangs.clear()
            raise ServerLostError("http://0/update_weights gave no answer")
        await control(self, path, *rest, **more)

    monkeypatch.setattr(StandIn, "control", hanging)
    scene = Scene()
    with opened(scene, 2) as fleet:
        published_to(fleet, 1)

        async def main() -> list[Sample]:
            hangs.set()
            publishing = asyncio.create_task(fleet.update_weights(None, 2))
            await until(lambda: ("http://1", 2) in scene.taken)
            fleet._holds_prefix[ASKED.prompt_ids] = 1
            samples = await fleet.generate(ASKED)
            served.set()
            await publishing
            return samples

        # The stand-ins' canary is compared at once, and not on the thread that waits in `run`.
        (sample,) = fleet.run(main())
        assert (sample.engine, sample.versions) == (1, [2])
        assert scene.notes == [
            "engine http://0 is fenced: http://0/update_weights gave no answer",
            "engine http://0 serves again",
        ]
        assert fleet.versions() == [2, 2]


def test_no_heal_sends_old_weights_beside_a_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request fails while the publication is prepared, and its server gets the new weights, once, and no others."""
    asked: list[str] = []
    control, prepares = StandIn.control, threading.Event()

    async def noting(self: StandIn, path: str, body: Any = None, *rest: Any, **more: Any) -> None:
        asked.append(path + (body or {}).get("weight_version", ""))
        await control(self, path, body, *rest, **more)

    async def answer(request: Request, deadline_s: float | None) -> None:
        if request.request_id == "asked" and prepares.is_set():
            prepares.clear()
            raise ServerLostError("http://0 broke off")

    monkeypatch.setattr(StandIn, "control", noting)
    scene = Scene(answer=answer)
    with opened(scene) as fleet:
        published_to(fleet, 1)
        made, began, tasks = fleet._prepared, len(asked), list[asyncio.Task[list[Sample]]]()

        async def failed() -> None:
            tasks.append(asyncio.create_task(fleet.generate(ASKED)))
            await until(lambda: fleet._slots[0].fence is not None)
            await asyncio.sleep(0.05)  # in which a heal would send version 1

        def preparing(*of: Any) -> Update:
            prepares.set()
            asyncio.run_coroutine_threadsafe(failed(), fleet._loop).result(20)
            return made(*of)

        fleet._prepared = preparing
        published_to(fleet, 2)
        assert asked[began:] == ["/start_weight_update", "/update_weights", "/finish_weight_update2", "/resume"]
        ((sample,),) = fleet.run(all_of(tasks))
        assert sample.versions == [2]
        assert scene.taken == [("http://0", 1), ("http://0", 2)]
        assert scene.notes == ["engine http://0 is fenced: http://0 broke off"]


def test_a_server_that_is_lost_while_others_take_weights_is_healed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server has the new weights and loses a request, and the second one still reads them."""
    read, hangs, breaks = asyncio.Event(), asyncio.Event(), asyncio.Event()
    control = StandIn.control

    async def slow(self: StandIn, path: str, *rest: Any, **more: Any) -> None:
        if self.name == "http://1" and path == "/update_weights" and hangs.is_set():
            await asyncio.wait_for(read.wait(), 20)
        await control(self, path, *rest, **more)

    async def answer(request: Request, deadline_s: float | None) -> None:
        if request.request_id == "asked" and breaks.is_set():
            breaks.clear()
            raise ServerLostError("http://0 broke off")

    monkeypatch.setattr(StandIn, "control", slow)
    scene = Scene(answer=answer)
    with opened(scene, 2) as fleet:
        published_to(fleet, 1)

        async def main() -> list[Sample]:
            hangs.set()
            publishing = asyncio.create_task(fleet.update_weights(None, 2))
            await until(lambda: fleet.versions()[0] == 2 and fleet._slots[0].open)
            fleet._slots[1].open = False
            breaks.set()
            samples = await asyncio.wait_for(fleet.generate(ASKED), 20)
            assert not publishing.done()
            read.set()
            await publishing
            return samples

        (sample,) = fleet.run(main())
        assert (sample.engine, sample.versions) == (0, [2])
        assert scene.notes == ["engine http://0 is fenced: http://0 broke off", "engine http://0 serves again"]
        assert fleet.metrics()["engines_serving"] == 2


def test_requests_are_held_only_while_weights_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """nmoe's servers get requests while they read weights; vLLM is paused before that."""
    control = StandIn.control
    sampled: list[tuple[str, list[int]]] = []

    async def asking(self: StandIn, path: str, *rest: Any, **more: Any) -> None:
        if self.version == 1 and path in ("/update_weights", "/finish_weight_update"):
            asked = asyncio.create_task(fleet.generate(ASKED))
            await asyncio.sleep(0.02)
            sampled.append((path, asked.result()[0].versions if asked.done() else []))
            waiting.append(asked)
        await control(self, path, *rest, **more)

    formats: list[tuple[Format, list[int]]] = [("nmoe", [1]), ("hf", [])]
    for format, meanwhile in formats:
        with opened(Scene()) as fleet:
            fleet._format = format
            waiting: list[asyncio.Task[list[Sample]]] = []
            published_to(fleet, 1)
            monkeypatch.setattr(StandIn, "control", asking)
            sampled.clear()
            published_to(fleet, 2)
            assert sampled == [("/update_weights", meanwhile), ("/finish_weight_update", [])]
            assert [one[0].versions for one in fleet.run(all_of(waiting))] == [meanwhile or [2], [2]]
            monkeypatch.setattr(StandIn, "control", control)
