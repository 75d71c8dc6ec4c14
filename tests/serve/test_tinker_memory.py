"""What sessions, requests and samplers of Tinker's clients hold, and for how long; and whose turn it is for an adapter's slot."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.responses import Response

from nmoe.errors import StorageError, UserError
from nmoe.model.checkpoint import fingerprint, load_model
from nmoe.serve.openai.limits import Limits
from nmoe.serve.openai.process import Options
from nmoe.serve.tinker import futures as futures_module
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.fields import Fields
from nmoe.serve.tinker.futures import Futures
from nmoe.serve.tinker.models import TrainedModel
from nmoe.serve.tinker.process import serve
from nmoe.serve.tinker.samplers import SLOTS, Held, Sampler, Slots
from nmoe.serve.tinker.service import Service, metadata_of
from nmoe.serve.tinker.sessions import Sessions
from nmoe.serve.tinker.store import Store
from nmoe.serve.tinker.weights import Base, Shape, new_weights, tensors_of


class Payload:
    """Stands for a body of many bytes."""


def started(futures: Futures, name: str, work: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Response]:
    futures.start(name, "session", b"", work)
    return futures.retrieve(name)


async def giving(result: bytes | Exception, payload: object = None) -> bytes:
    if isinstance(result, Exception):
        raise result
    return result


def test_failed_requests_hold_nothing_but_their_reply() -> None:
    async def run() -> None:
        futures, payload = Futures(lambda *_: None), Payload()
        seen = weakref.ref(payload)
        failed = await started(futures, "one", giving(ValueError("bad"), payload))
        assert failed.body == b'{"error":"ValueError: bad","category":"server","detail":"ValueError: bad"}'
        del payload
        gc.collect()
        assert seen() is None
        assert b'"category":"user"' in (await started(futures, "two", giving(UserError("bad")))).body
        assert b'"category":"server"' in (await started(futures, "three", giving(StorageError("full")))).body

    asyncio.run(run())


def test_fetched_results_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "_KEPT_BYTES", 10_000)

    async def run() -> None:
        futures = Futures(lambda *_: None)
        for name in "abc":
            assert (await started(futures, name, giving(bytes(4000)))).body == bytes(4000)
        assert [futures.known(name, b"") for name in "abc"] == [False, True, True]
        for number in range(8):  # each counts as a thousand bytes
            await started(futures, f"small {number}", giving(b"x"))
        assert [futures.known(name, b"") for name in "bc"] == [False, False]
        assert futures.known("small 0", b"")
        assert (await futures.retrieve("small 7")).body == b"x"
        futures.end("session")
        assert not futures.known("small 7", b"")
        assert futures._fetched.total == 0
        assert not futures._unfetched

    asyncio.run(run())


def test_results_that_nobody_fetches_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of a session go, not those of another, and never the last one."""
    monkeypatch.setattr(futures_module, "_UNFETCHED_BYTES", 10_000)

    async def run() -> None:
        futures = Futures(lambda *_: None)
        for name, session in (("mine", "me"), ("a", "you"), ("b", "you"), ("c", "you"), ("d", "you")):
            futures.start(name, session, b"", giving(bytes(4000)))
            await asyncio.sleep(0.01)
            if name == "b":
                assert (await futures.retrieve("b")).body == bytes(4000)
        assert [futures.known(name, b"") for name in ("mine", "a", "b", "c", "d")] == [True, False, True, True, True]
        futures.start("huge", "you", b"", giving(bytes(20_000)))
        assert (await futures.retrieve("huge")).body == bytes(20_000)
        assert [futures.known(name, b"") for name in ("mine", "b", "c", "d")] == [True, True, False, False]
        for session in ("me", "you"):
            futures.end(session)
        assert not futures._unfetched

    asyncio.run(run())


def test_results_that_nobody_fetches_are_dropped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        futures = Futures(lambda *_: None)
        futures.start("alone", "nobody", b"", giving(b"x"))
        futures.start("runs", "nobody", b"", asyncio.sleep(60, b"x"))
        await asyncio.sleep(0.01)
        futures.forget()
        assert futures.known("alone", b"")
        monkeypatch.setattr(futures_module, "_UNFETCHED_S", -1.0)
        futures.forget()
        assert not futures.known("alone", b"")
        assert futures.known("runs", b"")

    asyncio.run(run())


def test_silent_sessions_end_and_are_forgotten() -> None:
    sessions = Sessions()
    silent, loud = sessions.begin({}), sessions.begin({})
    sessions.add_sampler(silent, "sampler", Sampler())
    silent.seen -= 601
    loud.seen -= 599
    assert sessions.silent() == [silent]
    sessions.end(silent, "its client has been silent for too long")
    assert not sessions.samplers
    assert sessions.silent() == []
    with pytest.raises(TinkerError, match="has ended: its client has been silent for too long"):
        sessions.live(silent.session_id)
    sessions.forget()
    assert set(sessions.all.values()) == {silent, loud}
    silent.seen -= 3600
    loud.seen -= 7200
    sessions.forget()
    assert set(sessions.all.values()) == {loud}


def test_messages_and_numbers_are_bounded() -> None:
    """A message may repeat what the client sent, and a number may be none of a float."""
    assert len(TinkerError("x" * 10**6).body()["error"]) == 2000
    with pytest.raises(TinkerError, match=r"^eps = 1000+\.\.\.: must be 1e-30 or more, and below inf$"):
        Fields({"eps": 10**400}).number("eps", least=1e-30)
    with pytest.raises(TinkerError, match=r"^beta1 = nan: must be"):
        Fields({"beta1": float("nan")}).number("beta1")


def test_metadata_are_bounded() -> None:
    assert metadata_of(Fields({"user_metadata": {"run": "one"}})) == {"run": "one"}
    with pytest.raises(TinkerError, match="user_metadata: has 70,002 bytes as JSON; at most 65,536 are kept"):
        metadata_of(Fields({"user_metadata": "x" * 70_000}))
    nested: Any = []
    for _ in range(200):
        nested = [nested]
    with pytest.raises(TinkerError, match="user_metadata: is nested more than 100 deep"):
        metadata_of(Fields({"user_metadata": nested}))


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"form": "harmony"}, "--format"),
        ({"limits": Limits(body_bytes=2**20)}, "--max-body-mb"),
        ({"limits": Limits(prompt_tokens=5)}, "--max-prompt-tokens"),
        ({"limits": Limits(samples=5)}, "--max-n"),
        ({"limits": Limits(stops=5)}, "--max-stop"),
        ({"limits": Limits(requests=5)}, "--max-requests"),
        ({"limits": Limits(request_s=5)}, "--deadline"),
        ({"limits": Limits(stalled_s=5)}, "--stalled"),
    ],
)
def test_options_of_the_other_protocol_are_refused(change: dict[str, Any], option: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{option}: is for clients of OpenAI's API; leave it out with --tinker"):
        serve(Options(tmp_path, **change), tmp_path)


class Engine:
    """Holds adapters as an engine does."""

    def __init__(self) -> None:
        self.adapters: dict[str | None, Any] = {}
        self.loads = 0

    async def between_steps(self, action: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        return action()

    def put_adapter(self, name: str, lora: Any) -> None:
        self.adapters[name] = lora

    def adapter_changed(self, name: str, version: int) -> None:
        self.loads += 1


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> Base:
    return Base(load_model(checkpoint).requires_grad_(False), "tiny", checkpoint, fingerprint(checkpoint))


def sampler_of(base: Base, number: int, directory: Path) -> Sampler:
    values = [torch.full_like(one, number) for one in tensors_of(new_weights(base, Shape(2)))]
    return Sampler(Shape(2), Held.written(values, directory))


def held_by(engine: Engine, name: str | None) -> float:
    found = {float(one.unique()) for one in engine.adapters[name].parameters()}
    assert len(found) == 1
    return found.pop()


def test_values_lie_in_files_as_long_as_samplers_live(base: Base, tmp_path: Path) -> None:
    sampler = sampler_of(base, 7, tmp_path)
    assert sampler.held is not None
    assert {float(value.unique()) for value in sampler.held.read()} == {7.0}
    assert len(list(tmp_path.iterdir())) == 1
    sampler.held = None
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_fifth_sampler_is_not_held_up_by_four_busy_ones(base: Base, tmp_path: Path) -> None:
    """Each of four samplers always has a request, and the next comes before the last one ends."""

    async def run() -> list[int]:
        engine, began = Engine(), list[int]()
        slots = Slots(engine, base)  # type: ignore[arg-type]
        samplers = [sampler_of(base, number, tmp_path) for number in range(SLOTS + 1)]

        async def ask(number: int) -> None:
            async with slots.of(samplers[number]) as name:
                began.append(number)
                assert held_by(engine, name) == number
                await asyncio.sleep(0.02)
                assert held_by(engine, name) == number

        async def keep_busy(number: int) -> None:
            requests = []
            for _ in range(20):
                requests.append(asyncio.ensure_future(ask(number)))
                await asyncio.sleep(0.01)
            await asyncio.gather(*requests)

        busy = [asyncio.ensure_future(keep_busy(number)) for number in range(SLOTS)]
        await asyncio.sleep(0.05)
        before = len(began)
        await ask(SLOTS)
        waited = len(began) - before
        await asyncio.gather(*busy)
        assert waited < 2 * SLOTS + 1, "of those that came later none went first"
        return began

    assert len(asyncio.run(run())) == 20 * SLOTS + 1


def test_cancelled_requests_give_their_slots_back(base: Base, tmp_path: Path) -> None:
    async def run() -> None:
        engine = Engine()
        slots = Slots(engine, base)  # type: ignore[arg-type]
        samplers = [sampler_of(base, number, tmp_path) for number in range(SLOTS + 1)]
        ready = asyncio.Event()

        async def hold(number: int) -> None:
            async with slots.of(samplers[number]):
                await ready.wait()

        tasks = [asyncio.ensure_future(hold(number)) for number in range(SLOTS + 1)]
        for _ in range(2):  # at once, while a slot is being filled or waited for, and again once it is there
            tasks[0].cancel(), tasks[SLOTS].cancel()
            await asyncio.gather(tasks[0], tasks[SLOTS], return_exceptions=True)
            tasks[0], tasks[SLOTS] = asyncio.ensure_future(hold(0)), asyncio.ensure_future(hold(SLOTS))
            await asyncio.sleep(0.1)
        ready.set()
        await asyncio.gather(*tasks)
        for number, sampler in enumerate(samplers):
            async with asyncio.timeout(5), slots.of(sampler) as name:
                assert held_by(engine, name) == number

    asyncio.run(run())


def test_a_session_that_ends_meanwhile_gets_no_sampler(base: Base, tmp_path: Path) -> None:
    """The sampler of a path is one for all sessions, until other weights are saved there."""

    async def run() -> None:
        store, model, numbers = Store(tmp_path), TrainedModel(base, Shape(2)), count()
        service = Service(Engine(), base, None, tmp_path, ("tiny",), 4096, store)  # type: ignore[arg-type]

        def begun(number: int) -> Coroutine[Any, Any, Any]:
            asked = {"session_id": session.session_id, "sampling_session_seq_id": number, "model_path": path}
            return service.create_sampling_session(Fields(asked))

        def save() -> str:
            about = {"request": f"model:{next(numbers)}"}
            return store.save("model", "sampler_weights", "latest", model.save_for_sampling, about, True).path

        session, path = service.sessions.begin({}), save()
        await begun(0)
        await begun(1)
        save()
        await begun(2)
        one, same, other = service.sessions.samplers.values()
        assert one is same is not other
        save()
        late = asyncio.ensure_future(begun(3))
        await asyncio.sleep(0)
        service.end(session, "its client is done")
        with pytest.raises(TinkerError, match="has ended: its client is done"):
            await late
        assert not service.sessions.samplers

    asyncio.run(run())


def test_samplers_in_flight_move_in_their_slot(base: Base, tmp_path: Path) -> None:
    async def run() -> None:
        engine = Engine()
        slots = Slots(engine, base)  # type: ignore[arg-type]
        sampler = sampler_of(base, 1, tmp_path)

        async def once() -> str | None:
            async with slots.of(sampler) as name:
                await asyncio.sleep(0.01)
                return name

        async with slots.of(sampler) as name:
            assert held_by(engine, name) == 1
            sampler.held = sampler_of(base, 2, tmp_path).held
            assert await asyncio.gather(once(), once()) == [name, name]
            assert held_by(engine, name) == 2
        assert engine.loads == 2, "once for all that wait"

    asyncio.run(run())
