"""Where Tinker's server does its work and what it asks of the disk: threads, forced writes, devices, packed experts."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_copy import left_by_a_kill
from safetensors.torch import load_file
from tinker_client import datum

from nmoe.errors import StorageError, UserError
from nmoe.model.checkpoint import fingerprint, load_model
from nmoe.model.packed_experts import FP8Experts
from nmoe.serve.openai.process import Options
from nmoe.serve.tinker import journal as journal_module
from nmoe.serve.tinker import process, store
from nmoe.serve.tinker import service as service_module
from nmoe.serve.tinker.fields import Fields
from nmoe.serve.tinker.journal import Journal, Request, Row
from nmoe.serve.tinker.messages import message
from nmoe.serve.tinker.models import TrainedModel
from nmoe.serve.tinker.order import Order
from nmoe.serve.tinker.process import serve
from nmoe.serve.tinker.resume import resume
from nmoe.serve.tinker.samplers import Held
from nmoe.serve.tinker.service import Service
from nmoe.serve.tinker.store import Store
from nmoe.serve.tinker.weights import Base


class Engine:
    """Does at once what comes between steps."""

    def __init__(self) -> None:
        self.diverged: dict[str | None, str] = {}

    async def between_steps(self, action: Callable[[], Any]) -> Any:
        return action()


def service_in(root: Path, checkpoint: Path) -> Service:
    model = load_model(checkpoint).requires_grad_(False)
    base = Base(model, "tiny", checkpoint, fingerprint(checkpoint))
    return Service(Engine(), base, None, checkpoint, ("tiny",), 4096, Store(root))  # type: ignore[arg-type]


@pytest.fixture
def service(checkpoint: Path, tmp_path: Path) -> Service:
    return service_in(tmp_path / "saved", checkpoint)


async def made(service: Service) -> str:
    """Makes a model, and returns its id."""
    session = await service.begin({})
    about = {"session_id": session.session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    promise = service.create_model(json.dumps(about).encode(), Fields(about))
    await service.futures.retrieve(promise["request_id"])
    model_id: str = promise["model_id"]
    return model_id


async def reply(service: Service, promise: dict[str, Any]) -> bytes:
    return bytes((await service.futures.retrieve(promise["request_id"])).body)


async def trained(service: Service, model_id: str, first: int, steps: int) -> list[tuple[float, float]]:
    """Takes steps from a sequence id on; returns each one's loss and the norm of its gradient."""
    found = []
    for seq_id in range(first, first + 2 * steps, 2):
        one = datum([40, 41, 42], target_tokens=[41, 42, seq_id], weights=[1.0, 1.0, 1.0])
        body = message("ForwardBackwardRequest")(model_id=model_id, seq_id=seq_id, data=[one], loss_fn="cross_entropy")
        passed = await reply(service, await service.forward_backward(body.SerializeToString()))
        asked = {"model_id": model_id, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 1e-2}}
        stepped = await reply(service, service.optim_step(json.dumps(asked).encode(), Fields(asked)))
        loss = message("ForwardBackwardOutput").FromString(passed).metrics["loss:sum"]
        found.append((loss, json.loads(stepped)["metrics"]["grad_norm"]))
    return found


@pytest.mark.parametrize("times", [0.0, math.inf], ids=["kept after each step", "run again from the first"])
def test_a_model_goes_on_from_where_it_was_kept(
    times: float, service: Service, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves the files as they are: here a copy of them."""
    monkeypatch.setattr(service_module, "_TIMES", times)

    async def run() -> None:
        model_id = await made(service)
        (session_id,) = service.sessions.all
        await trained(service, model_id, 1, 3)
        again = service_in(left_by_a_kill(tmp_path / "saved", tmp_path / "copy"), checkpoint)
        ((directory, kept_at),) = again.journal.models(session_id).values()
        assert kept_at == (6 if times == 0 else 0)
        assert [file.name for file in again.journal.directory.glob("model-*")] == [directory]
        resume(again)
        # The request before comes again, whose reply was lost.
        asked = {"model_id": model_id, "seq_id": 6, "adam_params": {"learning_rate": 1e-2}}
        last = [await reply(one, one.optim_step(json.dumps(asked).encode(), Fields(asked))) for one in (service, again)]
        assert last[0] == last[1]
        assert await trained(again, model_id, 7, 2) == await trained(service, model_id, 7, 2)

    asyncio.run(run())


def test_requests_that_did_nothing_do_not_run_again(
    service: Service, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass whose predecessor never came, and one with bad data: neither is in the gradient, before a kill and after."""
    monkeypatch.setattr(service_module, "_TIMES", math.inf)

    async def run() -> None:
        model_id = await made(service)
        run = service.sessions.runs[model_id]
        run.order = Order(1, patience_s=0.05)
        await trained(service, model_id, 1, 1)
        one = datum([40, 41], target_tokens=[41, 42], weights=[1.0, 1.0])
        late = message("ForwardBackwardRequest")(model_id=model_id, seq_id=4, data=[one], loss_fn="cross_entropy")
        bad = message("ForwardBackwardRequest")(model_id=model_id, seq_id=5, data=[one], loss_fn="none")
        for sent, why in ((late, b"the request 3 before it never came"), (bad, b"is not one of this server's")):
            assert why in await reply(service, await service.forward_backward(sent.SerializeToString()))
        again = service_in(left_by_a_kill(tmp_path / "saved", tmp_path / "copy"), checkpoint)
        resume(again)
        assert await trained(again, model_id, 6, 2) == await trained(service, model_id, 6, 2)

    asyncio.run(run())


def test_a_model_that_cannot_be_as_it_was_fails(
    service: Service, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_TIMES", math.inf)

    async def run() -> None:
        model_id = await made(service)
        await trained(service, model_id, 1, 1)
        again = service_in(left_by_a_kill(tmp_path / "saved", tmp_path / "copy"), checkpoint)

        def breaks(*_: Any) -> bytes:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(TrainedModel, "run", breaks)
            resume(again)
            asked = {"model_id": model_id, "seq_id": 3, "adam_params": {}}
            promise = again.optim_step(json.dumps(asked).encode(), Fields(asked))
            assert b"MemoryError" in await reply(again, promise)

    asyncio.run(run())


def test_packed_experts_are_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = load_model(checkpoint)
    next(iter(packed.moe_layers())).down_packed = FP8Experts(1, 2, 2)
    monkeypatch.setattr(process, "load_policy", lambda *_: (packed, None))
    with pytest.raises(UserError, match="whose experts are packed cannot be trained"):
        serve(Options(checkpoint, port=0), tmp_path)


def test_passes_are_read_beside_the_event_loop(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bodies have megabytes; meanwhile other clients are answered."""
    read_on = dict[str, int]()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any) -> Any:
            read_on[name] = threading.get_ident()
            return call(*given)

        return act

    for name in ("parsed", "digest", "read_pass"):
        monkeypatch.setattr(service_module, name, noted(name, getattr(service_module, name)))

    async def run() -> dict[str, Any]:
        model_id = await made(service)
        one = datum([40, 41], target_tokens=[41, 42], weights=[1.0, 1.0])
        body = message("ForwardBackwardRequest")(model_id=model_id, seq_id=1, data=[one], loss_fn="cross_entropy")
        read_on.clear()
        promise = await service.forward_backward(body.SerializeToString())
        reply = await service.futures.retrieve(promise["request_id"])
        found = message("ForwardBackwardOutput").FromString(bytes(reply.body))
        assert found.metrics["loss:sum"] > 0
        return dict(read_on)

    found = asyncio.run(run())
    assert set(found) == {"parsed", "digest", "read_pass"}
    assert threading.get_ident() not in found.values()


def test_saved_weights_are_forced_to_disk_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[tuple[str, str]]()
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        done.append(("renamed", target.name))
        return rename(self, target)

    monkeypatch.setattr(store, "sync", lambda path: done.append(("forced", path.name)))
    monkeypatch.setattr(Path, "rename", renamed)

    def write(directory: Path) -> None:
        (directory / "values").write_text("1")

    Store(tmp_path).save("model", "weights", "one", write, {"request": "model:1"}, overwrite=False)
    *before, (_, fresh), named = done[:-3]
    last = done[-3:]
    assert sorted(before) == [("forced", "tinker.json"), ("forced", "values")]
    assert fresh.startswith(".new-")
    assert named == ("renamed", "one")
    assert last == [("forced", "weights"), ("forced", "model"), ("forced", tmp_path.name)], "and the names above"


class OnDevice:
    """Values that lie on an accelerator: they can be copied to the host, and nothing else."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def detach(self) -> OnDevice:
        return self

    def cpu(self) -> torch.Tensor:
        return self._values


def test_a_samplers_values_are_copied_from_their_device(tmp_path: Path) -> None:
    values = [torch.arange(6.0).view(2, 3), torch.tensor([-1.5])]
    held = Held.written([OnDevice(value) for value in values], tmp_path)  # type: ignore[misc]
    assert all(torch.equal(one, other) for one, other in zip(held.read(), values, strict=True))
    assert load_file(held.file)["1"].item() == -1.5


def test_rows_are_written_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk refuses the rows of a result; a request that it refuses is dropped."""
    monkeypatch.setattr(journal_module, "_AGAIN_S", 0.01)

    async def run() -> list[Row]:
        journal = Journal(tmp_path / "state")
        request = Request("model:1", "model", 1, "optim_step", b"", b"body")
        await journal.settled(journal.begin_session("session", "base", {"a": 1}), journal.take(request, "session"))
        journal._rows.execute("PRAGMA max_page_count = 1")  # not below what there is: no page more
        large = Request("model:2", "model", 2, "optim_step", b"", bytes(2**20))
        with pytest.raises(StorageError, match="cannot be written: database or disk is full"):
            await journal.settled(journal.take(large, "session"))
        unit = journal.done(request, "session", bytes(2**20), "application/json", 2)
        with pytest.raises(StorageError):
            await journal.settled(unit)
        waits = asyncio.ensure_future(journal.written(unit))
        await asyncio.sleep(0.05)
        assert not waits.done()
        journal._rows.execute("PRAGMA max_page_count = 100000")
        await waits
        assert journal.outcome("model:1") == bytes(2**20)
        return journal.requests("session")

    (found,) = asyncio.run(run())
    assert (found.seq_id, found.body_bytes, found.media, found.next) == (1, 0, "application/json", 2)


def test_two_servers_do_not_share_a_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path / "state")
    with pytest.raises(UserError, match="another server keeps its clients' models there; choose another directory"):
        Journal(tmp_path / "state")
    assert first.sessions() == []


def test_the_journal_of_a_killed_process_is_read(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, signal, sys; from pathlib import Path\n"
        "from nmoe.serve.tinker.journal import Journal, Request\n"
        "async def run():\n"
        "    journal = Journal(Path(sys.argv[1]))\n"
        "    journal.begin_session('session', 'base', {'display_name': 'mine'})\n"
        "    journal.begin_session('other', 'of another base', {})\n"
        "    for number in range(5):\n"
        "        journal.take(Request(f'model:{number}', 'model', number, 'optim_step', b'd', b'b'), 'session')\n"
        "    for number in range(3):\n"
        "        done = Request(f'model:{number}', 'model', number, 'optim_step', b'd', b'b')\n"
        "        kept = 'model-one' if number == 1 else None\n"
        "        journal.done(done, 'session', b'result', 'application/json', number + 1, again=number > 1, kept=kept)\n"
        "    journal.forget('model:1', 'session'), journal.forget('model:3', 'session')\n"
        "    journal.add_sampler('flying', 'session', 'model', 4, True, False, 'values-two', None)\n"
        "    journal.move_samplers('session', 'values-two', 'values-three')\n"
        "    await journal.flush()\n"
        "    journal.end_session('session')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(run())"
    )
    state = tmp_path / "state"
    assert subprocess.run([sys.executable, "-c", script, str(state)]).returncode == -9
    for name in ("model-one", "model-two"):
        (state / name).mkdir()
    for name in ("values-two", "values-three"):
        (state / name).touch()
    journal = Journal(state)
    journal.tidy()
    mine, other = journal.sessions()
    assert mine == ("session", "base", {"display_name": "mine"}), "its end was not written"
    assert other == ("other", "of another base", {})
    found = [
        (one.seq_id, journal.body(one.request_id), journal.outcome(one.request_id), one.media)
        for one in journal.requests("session")
    ]
    done = "application/json"
    assert found == [
        (0, b"", b"result", done),
        (1, b"", b"", journal_module.FORGOTTEN),
        (2, b"b", b"result", done),
        (3, b"b", b"", None),
        (4, b"b", b"", None),
    ]
    assert journal.models("session") == {"model": ("model-one", 1)}
    assert journal.samplers("session") == [("flying", "model", 4, 1, 0, "values-three", None)]
    assert {file.name for file in state.iterdir()} >= {"model-one", "values-three"}
    assert not {file.name for file in state.iterdir()} & {"model-two", "values-two"}
