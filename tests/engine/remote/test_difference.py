"""Weights that are published as differences: the same bits as the learner's after any number of them, whatever is lost between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import MOE, peaked_model
from torch import Tensor

from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote import difference
from nmoe.engine.remote.difference import Differences, patched
from nmoe.engine.remote.server import EngineServer, ServerLostError
from nmoe.engine.remote.weights import Format, Publisher, Update, digest_of, written
from nmoe.engine.server.app import Service, application
from nmoe.engine.server.weights import Weights
from nmoe.errors import StorageError, UserError
from nmoe.model.config import ModelConfig
from nmoe.model.shards import open_tensors
from nmoe.model.transformer import Transformer
from nmoe.rl.engines import Frozen

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool]


class Tensors:
    """A learner that has these tensors."""

    lora = None

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def weights(self, format: Format) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def drawn(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any bits, NaN and negative zero among them."""
    count = torch.empty(shape, dtype=dtype).nbytes
    high = 2 if dtype == torch.bool else 256
    whole = torch.randint(high, (max(count, 1),), dtype=torch.uint8, generator=generator)[:count]
    return whole.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_old_weights_and_the_difference_are_the_new_weights(
    shapes: list[list[int]], dtype: torch.dtype, share: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = {f"layer#{number}": drawn(dtype, tuple(shape), generator) for number, shape in enumerate(shapes)}
    new = {}
    for name, tensor in old.items():
        changes = torch.rand(tensor.shape, generator=generator) < share
        new[name] = torch.where(changes, drawn(dtype, tuple(tensor.shape), generator), tensor)
    place = tmp_path_factory.mktemp("difference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(difference, "_ELEMENTS", 7)
        learner, differences = Tensors(old), Differences(partial(written, shared=place))
        assert differences.prepared(learner, "nmoe", 1).info["transport"] == "disk"
        learner.tensors = new
        update = differences.prepared(learner, "nmoe", 2)
        assert update.info["transport"] == "delta"
        assert update.info["bases"] == [digest_of(tensor) for tensor in old.values()]
        assert update.info["digests"] == [digest_of(tensor) for tensor in new.values()]
        stored = open_tensors(Path(update.info["path"]))
        changed = {name for name in new if bits(new[name]) != bits(old[name])}
        assert {key.rpartition("#")[0] for key in stored.files} == changed
        before = {name: bits(tensor) for name, tensor in old.items()}
        found = patched(old, stored)
    assert {name: bits(tensor) for name, tensor in found.items()} == {name: bits(one) for name, one in new.items()}
    assert {name: bits(tensor) for name, tensor in old.items()} == before, "requests still sample by them"


def test_a_step_that_changes_one_element_in_1000_moves_a_400th_of_the_bytes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1000, 1000, generator=generator).bfloat16()
    new = torch.where(torch.rand(1000, 1000, generator=generator) < 0.002, (old.float() * 1.01).bfloat16(), old)
    learner, differences = Tensors({"one": old, "two": old}), Differences(partial(written, shared=tmp_path))
    first = differences.prepared(learner, "nmoe", 1)
    learner.tensors = {"one": new, "two": old}
    second = differences.prepared(learner, "nmoe", 2)
    assert first.moved > 4_000_000
    assert second.moved < first.moved / 400
    assert second.size == first.size == 4_000_000, "what a server has to check"


class Still(NativeEngine):
    """An engine without requests: nothing runs that a change of weights would have to wait for."""

    async def replace_weights(self, put: Callable[[], None], version: int, recompute: bool) -> None:
        assert recompute
        put()

    async def resume(self) -> None:
        pass


class Served:
    """A server in this process. `restart` puts another one, with the first weights, in its place."""

    def __init__(self, model: ModelConfig) -> None:
        self.config = model
        self.restart()

    def restart(self) -> None:
        self.model = peaked_model(self.config, 0)
        engine = Still(self.model, 4)
        self.app: Any = application(Service(engine, Weights(engine, self.model, None), {}), "")

    async def __call__(self, *of: Any) -> None:
        await self.app(*of)


class Publishing:
    """A learner whose weights walk, and two servers that it publishes differences to."""

    def __init__(self, place: Path) -> None:
        config = ModelConfig(**MOE)
        self.learner, self.served = peaked_model(config, 0), [Served(config), Served(config)]
        self.source, self.version, self.draw = Frozen(self.learner, None), 0, random.Random(0)
        self.differences = Differences(partial(written, shared=place))
        self.update: Update | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async def on_caller(function: Callable[[], Any]) -> Any:
            return function()

        clients = [httpx2.AsyncClient(transport=httpx2.ASGITransport(app=one)) for one in self.served]
        config = self.learner.config
        self.servers = [EngineServer(f"server_{n}", f"http://{n}", one, config) for n, one in enumerate(clients)]
        self.publisher = Publisher(self.source, "nmoe", "gloo", on_caller)
        yield
        for client in clients:
            await client.aclose()

    async def publish(self, harm: Callable[[Path], None] | None = None) -> dict[EngineServer, ServerLostError]:
        self.version += 1
        for tensor in self.draw.sample(list(self.learner.state_dict().values()), 5):
            if tensor.is_floating_point():
                tensor.add_(
                    torch.randn(tensor.shape, generator=torch.Generator().manual_seed(self.version)), alpha=1e-4
                )
        self.update = self.differences.prepared(self.source, "nmoe", self.version)
        if harm is not None:
            harm(Path(self.update.info["path"]))
        failed = await self.publisher.send(self.update, self.servers)
        if not failed:
            self.update.discard()
        return failed

    def wrong(self) -> list[int]:
        """The servers that have other bits than the learner."""
        return [number for number, one in enumerate(self.served) if state(one.model) != state(self.learner)]


def state(model: Transformer) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def test_after_45_publications_the_weights_are_the_same_bits(tmp_path: Path) -> None:
    async def main() -> None:
        run = Publishing(tmp_path)
        async with run.opened():
            full, wholes = [], 0
            for number in range(45):
                assert await run.publish() == {}
                assert run.wrong() == []
                if run.publisher.wholes > wholes:
                    full.append(number)
                wholes = run.publisher.wholes
            assert full == [0, 20, 40]
            assert wholes == 2 * 3

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_was_started_again_or_took_others_weights_is_sent_all(tmp_path: Path) -> None:
    async def main() -> None:
        run = Publishing(tmp_path)
        async with run.opened():
            await run.publish()
            await run.publish()
            run.served[1].restart()  # behind the same address: only the server itself can know
            ((server, why),) = (await run.publish()).items()
            assert server is run.servers[1]
            assert "status 409: transport = 'delta': it is from other weights than the last update's; send all" in str(
                why
            )
            assert run.wrong() == [1]
            assert run.update is not None
            assert await run.publisher.send(run.update, [server]) == {}
            assert run.wrong() == []
            assert run.publisher.wholes == 2 + 1

            others = Differences(partial(written, shared=tmp_path)).prepared(
                Frozen(peaked_model(run.learner.config, 9), None), "nmoe", 9
            )
            control = run.servers[0].control
            await control("/start_weight_update")
            await control("/update_weights", {"update_info": others.info})
            await control("/finish_weight_update", {"weight_version": "9"})
            (refused,) = await run.publish()
            assert refused is run.servers[0]
            assert await run.publisher.send(run.update, [refused]) == {}
            assert await run.publish() == {}
            assert run.wrong() == []
            assert run.publisher.wholes == 2 + 1 + 1, "the last one was a difference again"

    asyncio.run(main())


def flip(directory: Path) -> None:
    """Other bytes in the middle of the file."""
    (file,) = directory.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-40:-20] = bytes(20)
    file.write_bytes(content)


def cut(directory: Path) -> None:
    (file,) = directory.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def remove(directory: Path) -> None:
    (file,) = directory.glob("*.safetensors")
    file.unlink()


def of_the_step_before(kept: list[bytes], directory: Path) -> None:
    """A whole file, and another publication's."""
    (file,) = directory.glob("*.safetensors")
    kept.append(file.read_bytes())
    file.write_bytes(kept[0])


@pytest.mark.parametrize("harm", [flip, cut, remove, partial(of_the_step_before, [])])
def test_a_difference_that_is_torn_changed_or_lost_is_healed_by_all_weights(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    async def main() -> None:
        run = Publishing(tmp_path)
        async with run.opened():
            await run.publish()
            await run.publish(harm if isinstance(harm, partial) else None)
            failed = await run.publish(harm)
            assert set(failed) == set(run.servers), "both read the same file"
            assert run.wrong() == [0, 1]
            assert run.update is not None
            assert await run.publisher.send(run.update, run.servers) == {}
            assert run.wrong() == []
            assert run.publisher.wholes == 2 + 2

    asyncio.run(main())


def test_a_full_disk_leaves_the_last_publication_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    async def main() -> None:
        run = Publishing(tmp_path)
        async with run.opened():
            await run.publish()
            monkeypatch.setattr("nmoe.model.shards.save_file", full)
            with pytest.raises(StorageError, match="cannot be written: No space left on device"):
                await run.publish()
            monkeypatch.undo()
            assert await run.publish() == {}
            assert run.wrong() == []
            assert run.publisher.wholes == 2

    asyncio.run(main())


@pytest.mark.parametrize(("key", "data"), [("two#0", [0]), ("one#x", [0]), ("one", [0]), ("one#0", [1, 2, 3])])
def test_files_that_are_no_difference_of_these_tensors_are_refused(key: str, data: list[int], tmp_path: Path) -> None:
    directory, _ = written(iter([(key, torch.tensor(data, dtype=torch.uint8))]), 0, tmp_path)
    with pytest.raises(UserError, match=r"names no part of a tensor that is there|is torn"):
        patched({"one": torch.zeros(8)}, open_tensors(directory))
