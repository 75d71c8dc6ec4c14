"""What a publication asks of servers, in which order, and the files that it writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import MOE, peaked_model
from torch import Tensor

from nmoe.engine.remote.server import EngineServer, ServerLostError
from nmoe.engine.remote.weights import Format, Publisher, Update, digest_of, prepared
from nmoe.errors import StorageError
from nmoe.model.config import ModelConfig
from nmoe.model.shards import INDEX, open_tensors
from nmoe.rl.engines import Frozen

COMMIT = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]


def source() -> Frozen:
    return Frozen(peaked_model(ModelConfig(**MOE), 0), None)


def asked_of(format: Format, sleeping: bool) -> tuple[list[str], ServerLostError | None]:
    """Returns what a server is asked for in one publication, and why it failed."""
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        return httpx2.Response(200, json={"is_sleeping": sleeping})

    async def on_caller(function: Callable[[], Any]) -> Any:
        return function()

    async def publish() -> ServerLostError | None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
            server = EngineServer("one", "http://one", client, ModelConfig(**MOE))
            update = Update(3, {"transport": "disk", "digests": []}, 0, None, 0)
            return (await Publisher(source(), format, "gloo", on_caller).send(update, [server])).get(server)

    failed = asyncio.run(publish())
    return asked, failed


def test_vllm_pauses_for_an_update_and_nmoes_server_samples_on() -> None:
    assert asked_of("hf", False) == (["/is_sleeping", "/pause", *COMMIT, "/resume"], None)
    assert asked_of("nmoe", False) == ([*COMMIT, "/resume"], None), "somebody may have paused it"


def test_each_worker_of_each_server_has_a_rank_in_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[dict[str, Any]] = []
    made: list[tuple[Any, ...]] = []

    class Group:
        def broadcast(self, tensor: Tensor, root: int) -> Any:
            return SimpleNamespace(wait=lambda: None)

    def group_of(store: Any, *place: Any) -> Group:
        made.append((store.port, *place))
        return Group()

    def answer(request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content or b"{}")
        if body.get("init_info"):
            announced.append(body["init_info"])
        return httpx2.Response(200, json={"is_sleeping": False})

    async def on_caller(function: Callable[[], Any]) -> Any:
        return function()

    async def publish() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
            servers = [EngineServer(name, "http://127.0.0.1:9", client, ModelConfig(**MOE)) for name in ("one", "two")]
            update = Update(3, {"transport": "group"}, 0, None, 0)
            assert await Publisher(source(), "nmoe", "gloo", on_caller, workers=2).send(update, servers) == {}

    monkeypatch.setattr("nmoe.engine.remote.weights.group_of", group_of)
    asyncio.run(publish())
    assert [(one["rank"], one["world_size"], one["backend"]) for one in announced] == [(1, 5, "gloo"), (3, 5, "gloo")]
    ((port, *place),) = made
    assert {one["port"] for one in announced} == {port}
    assert place == [0, 5, "gloo", timedelta(seconds=50)]


def test_an_engine_that_sleeps_gets_no_weights() -> None:
    asked, failed = asked_of("hf", True)
    assert asked == ["/is_sleeping"]
    assert str(failed) == "one sleeps, and weights that come now are lost when it wakes; post /wake_up to it"


def test_a_server_gets_all_weights_of_its_own_update_while_another_reads_older_ones(tmp_path: Path) -> None:
    """Two differences fit no server, and the second one is sent while the first one's whole weights are still read."""
    sent: list[tuple[str, str]] = []
    versions: list[tuple[str, str]] = []
    reads, goes_on = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx2.Request) -> httpx2.Response:
        body, host = json.loads(request.content or b"{}"), request.url.host
        if request.url.path == "/update_weights":
            sent.append((host, Path(body["update_info"]["path"]).name))
            if host == "one":
                reads.set()
                await goes_on.wait()
        elif request.url.path == "/finish_weight_update":
            versions.append((host, body["weight_version"]))
        return httpx2.Response(200, json={})

    def difference(version: int) -> Update:
        def whole() -> Update:
            directory = tmp_path / f"whole_{version}"
            directory.mkdir()
            return Update(version, {"transport": "disk", "path": str(directory)}, 0, directory, 0)

        info = {"transport": "delta", "path": "difference", "bases": ["of another"], "digests": [f"{version}"]}
        return Update(version, info, 0, tmp_path / f"difference_{version}", 0, whole)

    async def on_caller(function: Callable[[], Any]) -> Any:
        return function()

    async def publish() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
            one, two = (EngineServer(name, f"http://{name}", client, ModelConfig(**MOE)) for name in ("one", "two"))
            publisher = Publisher(source(), "nmoe", "gloo", on_caller)
            older = asyncio.create_task(publisher.send(difference(1), [one]))
            await reads.wait()
            assert await publisher.send(difference(2), [two]) == {}
            assert [path.name for path in tmp_path.iterdir()] == ["whole_1"], "it is still read"
            goes_on.set()
            assert await older == {}
            assert publisher.wholes == 2

    asyncio.run(publish())
    assert sent == [("one", "whole_1"), ("two", "whole_2")]
    assert versions == [("two", "2"), ("one", "1")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [4000, 10**9])
def test_files_are_written_while_tensors_are_gathered(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe.engine.remote.weights._SHARD_BYTES", limit)
    learner, files = source(), set[int]()
    weights = learner.weights

    def watched(format: Format) -> Iterator[tuple[str, Tensor]]:
        for one in weights(format):
            yield one
            files.add(len(list(directories()[-1].glob("*.safetensors"))))

    def directories() -> list[Path]:
        found = [*Path("/dev/shm").glob("nmoe_weights_*")]
        return sorted(found, key=lambda path: path.stat().st_ctime_ns)

    monkeypatch.setattr(learner, "weights", watched)
    update = prepared(learner, "nmoe", 1, transport="disk")
    assert update.directory is not None
    try:
        sizes = [
            sum(tensor.nbytes for tensor in one.values())
            for one in map(load_file, sorted(update.directory.glob("*.safetensors")))
            if len(one) > 1
        ]
        assert max(sizes) <= limit
        assert (update.directory / INDEX).exists() == (limit == 4000)
        assert files == {0} if limit > 4000 else {*range(10)} <= files
        stored, sent = open_tensors(update.directory), dict(weights("nmoe"))
        assert list(sent) == update.info["names"]
        assert set(stored.files) == set(sent)
        for (name, tensor), digest in zip(sent.items(), update.info["digests"], strict=True):
            assert torch.equal(stored.read(name), tensor)
            assert digest_of(tensor) == digest
        assert update.size == sum(tensor.nbytes for tensor in sent.values())
    finally:
        update.discard()


def test_a_full_disk_leaves_nothing_behind_and_the_other_ranks_gather_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    gathered, learner = [], source()
    weights = learner.weights
    monkeypatch.setattr(learner, "weights", lambda format: (gathered.append(one) or one for one in weights(format)))
    monkeypatch.setattr("nmoe.model.shards.save_file", full)
    monkeypatch.setattr("nmoe.engine.remote.weights._SHARD_BYTES", 1)
    before = set(Path("/dev/shm").glob("nmoe_weights_*"))
    with pytest.raises(StorageError, match="cannot be written: No space left on device"):
        prepared(learner, "nmoe", 1, transport="disk")
    assert len(gathered) == len(list(weights("nmoe")))
    assert set(Path("/dev/shm").glob("nmoe_weights_*")) <= before
