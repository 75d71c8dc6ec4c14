"""A fleet against servers that are lost, late or wrong at any moment: every sample is there once, and is the one that one process
samples."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch
from faulty_proxy import FAULTS, Fault, FaultyProxy
from tiny_models import MOE, peaked_model
from typer.testing import CliRunner

from nmoe.cli.command import app
from nmoe.config.tables.model import OptimizerSection
from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.fleet import Address
from nmoe.engine.remote.launcher import LocalLauncher, LocalProcess
from nmoe.engine.remote.process import ServerProcess, addresses
from nmoe.engine.remote.published import PublishedFleet
from nmoe.engine.remote.server import EngineServer, ServerLostError
from nmoe.engine.remote.weights import Transport
from nmoe.errors import InfrastructureError, UserError
from nmoe.learner.learner import Learner
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.rl.canary import LearnerCanary
from nmoe.types import Sample, Sampling

KEY = "a key of this test"
GENERATE = "/inference/v1/generate"


def new_learner() -> Learner:
    model = peaked_model(ModelConfig(**MOE), 0)
    model.set_numerics("exact")
    return Learner(model, OptimizerSection(learning_rate=1e-3), 10, 4096)


def servers_of(learner: Learner, directory: Path, count: int) -> list[ServerProcess]:
    base = directory / "base"
    if not base.exists():
        learner.export(base, "nmoe")
    section = RolloutEngineSection(kind="server", servers=count, max_sequences=8)
    return addresses(section, base, "exact", "float32", True, KEY, LocalLauncher(directory / "engines"))


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Three servers that all tests of this file share, behind proxies of their own."""
    processes = servers_of(new_learner(), tmp_path_factory.mktemp("server"), 3)
    yield [process.start() for process in processes]
    for process in processes:
        process.stop()


@pytest.fixture(scope="module")
def server(trio: list[str]) -> str:
    return trio[0]


def requests(count: int, tokens: int = 12) -> list[Request]:
    draw = random.Random(count)
    return [
        Request(tuple(draw.choices(range(48), k=6)), 3, Sampling(tokens, seed=number), f"request/{number}")
        for number in range(count)
    ]


@contextmanager
def fleet_of(
    learner: Learner, servers: list[Address], *, token_s: float = 1.0, transport: Transport = "disk"
) -> Iterator[tuple[PublishedFleet, list[str]]]:
    notes: list[str] = []
    canary = LearnerCanary(learner)
    canary.tokens = 8
    fleet = PublishedFleet(
        servers,
        learner,
        learner.model.config,
        canary,
        transport=transport,
        format="nmoe",
        precision="float32",
        token_s=token_s,
        key=KEY,
        note=notes.append,
    )
    with fleet:
        learner.publish(fleet).result()
        yield fleet, notes


def end(process: ServerProcess) -> None:
    """Kills a server, not the process that keeps it."""
    assert isinstance(process.process, LocalProcess)
    keeper = process.process.pid
    os.kill(int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0]), signal.SIGKILL)


async def gathered(engine: PublishedFleet | NativeEngine, asked: list[Request]) -> list[list[Sample]]:
    return await asyncio.gather(*(engine.generate(one) for one in asked))


def in_process(model: Transformer, version: int, asked: list[Request]) -> list[list[Sample]]:
    engine = NativeEngine(model, 8)
    engine.run(engine.update_weights(model, version))
    return engine.run(gathered(engine, asked))


def same(found: list[list[Sample]], wanted: list[list[Sample]]) -> bool:
    def plain(sample: Sample) -> Sample:
        return replace(sample, routes=None if sample.routes is None else sample.routes.tolist())

    return [list(map(plain, one)) for one in found] == [list(map(plain, one)) for one in wanted]


def test_weights_are_broadcast_to_all_servers_and_to_those_that_are_left(server: str, tmp_path: Path) -> None:
    learner, asked = new_learner(), requests(4)
    # Two servers of their own: a process joins one group at a time.
    processes = servers_of(learner, tmp_path, 2)
    with fleet_of(learner, list(processes), transport="group") as (fleet, notes):
        for version in (2, 3):
            with torch.no_grad():
                learner.model.embedding.weight.mul_(1.01)
            assert learner.publish(fleet).result() == version
            assert same(fleet.run(gathered(fleet, asked)), in_process(learner.model, version, asked))
        end(processes[0])
        learner.publish(fleet).result()
        assert fleet.metrics()["engines_serving"] == 2
        assert notes[-1] == "engine server_0 serves again after a restart"
        assert same(fleet.run(gathered(fleet, asked)), in_process(learner.model, 4, asked))


def no_fault(path: str, number: int) -> Fault | None:
    return None


def test_weights_of_many_files_arrive(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe.engine.remote.weights._SHARD_BYTES", 4000)
    learner = new_learner()
    with fleet_of(learner, [FaultyProxy(server, no_fault)]) as (fleet, _):
        assert fleet._update is not None
        assert fleet._update.directory is not None
        assert len(list(fleet._update.directory.glob("*.safetensors"))) >= 10
        assert same(fleet.run(gathered(fleet, requests(2))), in_process(learner.model, 1, requests(2)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_on_a_faulty_server_is_sampled_again_and_the_server_healed(
    trio: list[str], fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        survives(trio, fault, seed, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(1800)  # some faults are noticed at a deadline alone
@pytest.mark.parametrize("fault", FAULTS)
def test_twenty_moments_of_each_fault(trio: list[str], fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2, 22):
        survives(trio, fault, seed, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", [GENERATE, "/update_weights"])
def test_twenty_kills(trio: list[str], path: str, tmp_path: Path) -> None:
    """One of two servers is killed while it samples, or while it takes weights; after the publication both serve."""
    learner, asked, draw = new_learner(), requests(6), random.Random(path)
    (process,) = servers_of(learner, tmp_path, 1)
    due: list[float] = []
    kills: list[threading.Timer] = []

    def at(called: str, number: int) -> Fault | None:
        if due and called == path:
            kills.append(threading.Timer(due.pop(), end, [process]))
            kills[-1].start()
        return None

    with fleet_of(learner, [FaultyProxy(process, at), FaultyProxy(trio[0], no_fault)]) as (fleet, _):
        for version in range(2, 22):
            due.append(draw.uniform(0, 0.05))
            assert same(fleet.run(gathered(fleet, asked)), in_process(learner.model, version - 1, asked))
            for kill in kills:
                kill.join()
            with torch.no_grad():
                learner.model.embedding.weight.mul_(1.01)
            assert learner.publish(fleet).result() == version
            assert fleet.metrics()["engines_serving"] == 2
            assert same(fleet.run(gathered(fleet, asked)), in_process(learner.model, version, asked))
            assert len(kills) == version - 1
        assert fleet.metrics()["engine_requests_lost"] == 0


def survives(trio: list[str], fault: Fault, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault at a moment drawn at random: every sample is there once, and the server serves after the next publication."""
    monkeypatch.setattr("nmoe.engine.remote.published.DEADLINE_S", 5.0)  # a busy machine answers within it
    learner, asked = new_learner(), requests(6)
    draw = random.Random(f"{fault} {seed}")
    # The canary of the first publication samples 8 prompts or more.
    moment = draw.randrange(3)
    began = 0

    def at(path: str, number: int) -> Fault | None:
        return fault if path == GENERATE and began and number == began + moment else None

    proxies = [FaultyProxy(trio[0], at), FaultyProxy(trio[1], no_fault)]
    with fleet_of(learner, list(proxies), token_s=0.01) as (fleet, notes):
        began = proxies[0].seen[GENERATE] + 1
        started = time.monotonic()
        found = fleet.run(gathered(fleet, asked))
        assert proxies[0].done == [fault]
        assert same(found, in_process(learner.model, 1, asked))
        assert time.monotonic() - started < 60
        metrics = fleet.metrics()
        if fault == "twice":  # HTTP answers a request once; the connection with the second answer is not used again
            assert metrics["engine_requests_lost"] == 0
        else:
            assert metrics["engine_requests_retried"] >= 1
            assert notes[0].startswith("engine proxy is fenced: ")
        # The next publication reaches both, whatever became of the first.
        learner.publish(fleet).result()
        assert fleet.metrics()["engines_serving"] == 2
        assert same(fleet.run(gathered(fleet, asked)), in_process(learner.model, 2, asked))


def test_a_request_on_which_two_servers_are_lost_is_a_failure_of_the_engine(
    trio: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends every server it reaches would otherwise end all of them."""
    monkeypatch.setattr("nmoe.engine.remote.published.DEADLINE_S", 5.0)
    poisoned = False
    tries = 0

    def at(path: str, number: int) -> Fault | None:
        nonlocal tries
        tries += poisoned and path == GENERATE
        return "drop" if poisoned and path == GENERATE and tries <= 2 else None

    learner = new_learner()
    with fleet_of(learner, [FaultyProxy(url, at) for url in trio]) as (fleet, _):
        poisoned = True
        ((one, *others),) = fleet.run(gathered(fleet, requests(1)))
        assert (one.token_ids, one.finish_reason, len(others)) == ([], "abort", 2)
        assert tries == 2
        assert fleet.metrics()["engine_requests_lost"] == 1


def test_a_fleet_without_a_server_ends_with_the_reasons(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe.engine.remote.published.DEADLINE_S", 5.0)
    broken = False
    learner = new_learner()
    with fleet_of(learner, [FaultyProxy(server, lambda path, number: "drop" if broken else None)]) as (fleet, _):
        broken = True
        with pytest.raises(InfrastructureError, match=r"no engine is left to sample with: proxy: .*--run.resume=true"):
            fleet.run(gathered(fleet, requests(3)))


def test_wrong_weights_are_found_and_sent_again(server: str) -> None:
    """A transfer that breaks off, and one after which the server has other weights than the learner."""
    learner = new_learner()
    for fault in ("error", "drop"):
        broken = [""]

        def at(path: str, number: int, fault: Fault = fault, broken: list[str] = broken) -> Fault | None:
            if path == broken[0]:
                broken[0] = ""
                return fault
            return None

        with fleet_of(learner, [FaultyProxy(server, at)]) as (fleet, notes):
            for route in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
                broken[0] = route
                version = learner.publish(fleet).result()
                assert broken[0] == ""
                assert "fenced" in notes[-2]
                assert notes[-1] == "engine proxy serves again"
                assert same(fleet.run(gathered(fleet, requests(2))), in_process(learner.model, version, requests(2)))
    with fleet_of(learner, [FaultyProxy(server, no_fault)]) as (fleet, notes):
        weights = learner.weights

        def stale(format: str) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights(format):  # type: ignore[arg-type]
                yield name, tensor * 1.01 if "layers.1" in name or "blocks.1" in name else tensor

        learner.weights = stale  # type: ignore[assignment]
        with pytest.raises(
            InfrastructureError, match=r"differ from the learner's by up to .*, where 0\.0001 is rounding"
        ):
            learner.publish(fleet).result()


def test_a_server_that_is_healed_between_publications_gets_the_published_weights(server: str) -> None:
    learner, asked, faults = new_learner(), requests(4), dict[str, Fault]()
    with fleet_of(learner, [FaultyProxy(server, lambda path, number: faults.pop(path, None))]) as (fleet, notes):
        with torch.no_grad():
            learner.model.embedding.weight.mul_(1.1)
        learner.ahead = 1
        faults[GENERATE] = "drop"
        assert same(fleet.run(gathered(fleet, asked)), in_process(new_learner().model, 1, asked))
        assert notes[-1] == "engine proxy serves again"
        learner.publish(fleet).result()
        assert same(fleet.run(gathered(fleet, asked)), in_process(learner.model, 2, asked))


def test_a_publication_ends_heals_that_would_compare_older_weights(trio: list[str]) -> None:
    learner, faults = new_learner(), dict[str, Fault]()
    # A request is lost, and the heal that follows is still sending when the next publication comes.
    slow = FaultyProxy(trio[0], lambda path, number: faults.pop(path, None), late_s=6.0)
    with fleet_of(learner, [slow, FaultyProxy(trio[1], no_fault)]) as (fleet, notes):
        faults |= {GENERATE: "drop", "/update_weights": "late"}
        assert same(fleet.run(gathered(fleet, requests(4))), in_process(learner.model, 1, requests(4)))
        assert faults == {} or list(faults) == ["/update_weights"]
        faults.clear()
        with torch.no_grad():
            learner.model.embedding.weight.mul_(1.1)
        learner.publish(fleet).result()
        assert fleet.metrics()["engines_serving"] == 2
        assert [note.split(":")[0] for note in notes] == ["engine proxy is fenced"]


def test_an_interrupt_leaves_the_fleet_usable_and_nothing_behind(server: str) -> None:
    learner, closed = new_learner(), []

    async def interrupted(fleet: PublishedFleet) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        try:
            await fleet._on_caller(interrupt)
        finally:
            await asyncio.sleep(0.2)
            closed.append(True)

    before = set(Path("/dev/shm").glob("nmoe_weights_*"))
    with fleet_of(learner, [FaultyProxy(server, no_fault)]) as (fleet, _):
        with pytest.raises(KeyboardInterrupt):
            fleet.run(interrupted(fleet))
        assert closed == [True]
        assert same(fleet.run(gathered(fleet, requests(2))), in_process(learner.model, 1, requests(2)))
        assert len(set(Path("/dev/shm").glob(f"nmoe_weights_{os.getpid()}_*")) - before) == 1
    assert set(Path("/dev/shm").glob(f"nmoe_weights_{os.getpid()}_*")) <= before


def test_a_killed_server_is_started_again_with_the_present_weights(tmp_path: Path) -> None:
    learner = new_learner()
    (process,) = servers_of(learner, tmp_path, 1)
    with torch.no_grad():
        learner.model.embedding.weight.mul_(1.1)  # the checkpoint that it starts from is another
    with fleet_of(learner, [process]) as (fleet, notes):
        asked = requests(6, tokens=40)

        async def killed() -> list[list[Sample]]:
            sampling = asyncio.gather(*(fleet.generate(one) for one in asked))
            await asyncio.sleep(0.05)
            end(process)
            return await sampling

        assert same(fleet.run(killed()), in_process(learner.model, 1, asked))
        assert notes[-1] == "engine server_0 serves again after a restart"


@pytest.mark.parametrize(
    "reply",
    [
        *({"logprobs": logprobs, "weight_version": "0"} for logprobs in ([-0.5], [-0.5] * 3, [-0.5, None], None)),
        {"logprobs": [-0.5] * 2, "weight_version": "1"},
        {"choices": []},
        [],
    ],
)
def test_scores_that_are_not_of_the_tokens_are_refused(reply: object) -> None:
    """They may be the answer to another request."""

    async def asked() -> list[float]:
        answers = httpx2.MockTransport(lambda _: httpx2.Response(200, json=reply))
        async with httpx2.AsyncClient(transport=answers) as client:
            server = EngineServer("one", "http://127.0.0.1:1", client, ModelConfig(**MOE))
            return await server.score([1, 2, 3], 1.0, 0, 5.0)

    with pytest.raises(ServerLostError, match="one: the scores cannot be used"):
        asyncio.run(asked())


def test_requests_that_no_server_may_see_are_refused(server: str) -> None:
    learner = new_learner()
    with fleet_of(learner, [FaultyProxy(server, no_fault)]) as (fleet, _):
        for prompt, tokens, message in (
            ((1, 48), 4, "ids must lie in 0..47"),
            ((), 4, "ids"),
            ((1,) * 40, 40, "context of 64"),
        ):
            with pytest.raises(UserError, match=message):
                fleet.run(fleet.generate(Request(prompt, 1, Sampling(tokens), "a")))


@pytest.mark.parametrize(
    ("key", "message"),
    [("another", "refused the key; set NMOE_ENGINE_KEY"), (KEY, "its vocab_size is 48, and 50 is wanted")],
)
def test_a_server_that_cannot_be_used_is_named_before_the_run(server: str, key: str, message: str) -> None:
    learner = new_learner()
    config = ModelConfig(**(MOE | {"vocab_size": 48 if key != KEY else 50}))
    fleet = PublishedFleet(
        [FaultyProxy(server, no_fault)],
        learner,
        config,
        LearnerCanary(learner),
        transport="disk",
        format="nmoe",
        precision="float32",
        token_s=1.0,
        key=key,
        note=print,
    )
    with pytest.raises(UserError, match=message) as caught, fleet:
        pass
    assert caught.value.exit_code == 2


def test_a_checkpoint_is_published_without_a_run(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMOE_ENGINE_KEY", KEY)
    learner = new_learner()
    with torch.no_grad():
        learner.model.embedding.weight.mul_(1.3)
    learner.export(tmp_path / "other", "nmoe")
    url = FaultyProxy(server, no_fault).start()
    before = command(["engines", url])
    assert command(["publish", str(tmp_path / "other"), "--to", url])[0] == 0
    code, out = command(["engines", url])
    assert (before[0], code) == (0, 0)
    version = int(out.split("version ")[1].split(",")[0])
    assert version == int(before[1].split("version ")[1].split(",")[0]) + 1
    learner.version = version
    with fleet_of(learner, [FaultyProxy(server, no_fault)]) as (fleet, _):
        assert fleet.versions() == [version + 1]
    assert command(["engines", url, "http://127.0.0.1:9"])[0] == 1
    monkeypatch.setenv("NMOE_ENGINE_KEY", "another")
    assert "wrong key; set NMOE_ENGINE_KEY" in command(["engines", url])[1]


def command(arguments: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output
