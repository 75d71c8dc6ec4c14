"""Publications while requests run, by each mode of `async.in_flight`, and samples that wait for their server's canary."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from test_fleet import KEY, in_process, servers_of
from tiny_models import MOE, peaked_model

from nmoe.config.tables.asynchrony import InFlight
from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.remote.fleet import Address
from nmoe.engine.remote.process import RunningServer
from nmoe.engine.remote.published import PublishedFleet
from nmoe.engine.remote.server import EngineServer
from nmoe.learner.learner import Learner
from nmoe.model.config import ModelConfig
from nmoe.rl.canary import LearnerCanary, _batch_of
from nmoe.types import Sample, Sampling


def new_learner() -> Learner:
    # A second's tokens, so that a request still runs when weights come, on any machine.
    model = peaked_model(ModelConfig(**{**MOE, "context_tokens": 640}), 0)
    model.set_numerics("exact")
    return Learner(model, OptimizerSection(learning_rate=1e-3), 10, 4096)


@pytest.fixture(scope="module")
def servers(forked_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two servers that all tests of this file share."""
    processes = servers_of(new_learner(), tmp_path_factory.mktemp("server"), 2)
    yield [process.start() for process in processes]
    for process in processes:
        process.stop()


@contextmanager
def fleet_of(
    learner: Learner, urls: list[str], in_flight: InFlight = "recompute", most: int | None = None
) -> Iterator[PublishedFleet]:
    canary = LearnerCanary(learner)
    canary.tokens = 8
    addresses: list[Address] = [RunningServer(url) for url in urls]
    fleet = PublishedFleet(
        addresses,
        learner,
        learner.model.config,
        canary,
        format="nmoe",
        precision="float32",
        token_s=1.0,
        key=KEY,
        note=lambda line: None,
        in_flight=in_flight,
        most=most,
    )
    with fleet:
        learner.publish(fleet).result()
        yield fleet


async def begun(fleet: PublishedFleet, request: Request) -> asyncio.Task[list[Sample]]:
    """Starts a request, and returns once a server has it and has had time for some tokens."""
    task = asyncio.create_task(fleet.generate(request))
    await asyncio.sleep(0.15)
    return task


LONG = Request((1, 2, 3), 2, Sampling(600, seed=3), "long")


def published_meanwhile(learner: Learner, fleet: PublishedFleet) -> list[Sample]:
    task = fleet.run(begun(fleet, LONG))
    with torch.no_grad():
        learner.model.embedding.weight.mul_(1.5)
    learner.publish(fleet).result()

    async def done() -> list[Sample]:
        return await task

    return fleet.run(done())


def learned(learner: Learner, samples: list[Sample]) -> list[list[float]]:
    """The log-probabilities of the samples under the learner's weights, with the routes that the server took."""
    batch = _batch_of([(LONG.prompt_ids, one) for one in samples])
    values = iter(learner.logprobs(batch).result().tolist())
    return [[next(values) for _ in one.token_ids] for one in samples]


@pytest.mark.parametrize("in_flight", ["recompute", "stale_kv", "drain"])
def test_a_publication_beside_running_requests(servers: list[str], in_flight: InFlight) -> None:
    learner = new_learner()
    with fleet_of(learner, servers[:1], in_flight) as fleet:
        before = in_process(learner.model, 1, [LONG])[0]
        samples = published_meanwhile(learner, fleet)
        assert fleet.versions() == [2]
        read_again = sum(len(LONG.prompt_ids) + one.versions.count(1) for one in samples if one.versions[-1] == 2)
        assert fleet.reprefilled_tokens == (read_again if in_flight == "recompute" else 0)
    if in_flight == "drain":
        assert [one.versions for one in samples] == [one.versions for one in before]
        assert [one.logprobs for one in samples] == [one.logprobs for one in before]
        return
    now = learned(learner, samples)
    for one, old, computed in zip(samples, before, now, strict=True):
        changed = one.versions.count(1)
        assert one.versions == [1] * changed + [2] * (len(one.token_ids) - changed)
        assert one.logprobs[:changed] == old.logprobs[:changed]
        gaps = [abs(a - b) for a, b in zip(one.logprobs[changed:], computed[changed:], strict=True)]
        assert gaps, "it ended before the publication"
        assert (max(gaps) == 0.0) == (in_flight == "recompute"), "the keys of the old weights were kept"


def test_samples_wait_for_the_canary_and_are_tried_again_where_it_fails(
    servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server's canary is wrong for version 2, and its samples of that version are void."""
    learner, right = new_learner(), EngineServer.generate

    async def generate(self: EngineServer, request: Request, version: int | None, *rest: object) -> list[Sample]:
        samples = await right(self, request, version, *rest)  # type: ignore[arg-type]
        if self.url == servers[0].rstrip("/") and request.request_id.startswith("canary/2"):
            samples[0].logprobs[0] -= 1.0
        return samples

    with fleet_of(learner, servers) as fleet:
        monkeypatch.setattr(EngineServer, "generate", generate)
        fleet._holds_prefix[LONG.prompt_ids] = 0
        faults: list[int] = []
        fleet.on_fault = lambda engine, reason: faults.append(engine)
        samples = published_meanwhile(learner, fleet)
        assert set(faults) == {0}
        assert [one.engine for one in samples] == [1, 1]
        assert {version for one in samples for version in one.versions} == {2}
        assert fleet.discarded_tokens > 0
        assert fleet.metrics()["engine_requests_retried"] == 1


def test_a_server_gets_so_many_samples_and_the_lowest_order_first(
    servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, right = new_learner(), EngineServer.generate
    running, most, order = 0, 0, []

    async def generate(self: EngineServer, request: Request, *rest: object) -> list[Sample]:
        nonlocal running, most
        running += request.samples
        most = max(most, running)
        order.append(request.order)
        try:
            return await right(self, request, *rest)  # type: ignore[arg-type]
        finally:
            running -= request.samples

    async def all_of() -> None:
        asked = [Request((1, 2), 2, Sampling(6, seed=n), f"ordered/{n}", order=9 - n) for n in range(10)]
        await asyncio.gather(*map(fleet.generate, asked))

    with fleet_of(learner, servers[:1], most=4) as fleet:
        monkeypatch.setattr(EngineServer, "generate", generate)
        fleet.run(all_of())
    assert most == 4
    assert order[:2] == [9, 8], "there was room"
    assert order[2:] == list(range(8)), "then the lowest first"
