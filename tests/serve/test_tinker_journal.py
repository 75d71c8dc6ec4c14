"""Kills at chosen instants, disks that refuse, and repeats that fail: clients find what they were told, or hear that it is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import sqlite3
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_copy import left_by_a_kill
from tinker_client import datum

from nmoe.errors import DivergenceError, StorageError, UserError
from nmoe.model.checkpoint import fingerprint, load_model
from nmoe.serve.tinker import journal as journal_module
from nmoe.serve.tinker import service as service_module
from nmoe.serve.tinker.app import Server, application
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.fields import fields_of
from nmoe.serve.tinker.journal import Journal, Request, Unit
from nmoe.serve.tinker.messages import message
from nmoe.serve.tinker.models import TrainedModel
from nmoe.serve.tinker.resume import resume
from nmoe.serve.tinker.service import Service
from nmoe.serve.tinker.sessions import Run, Session
from nmoe.serve.tinker.store import Store
from nmoe.serve.tinker.weights import Base, Shape

FULL = "database or disk is full"


class Engine:
    """Does at once what comes between steps, until it stops."""

    def __init__(self) -> None:
        self.diverged: dict[str | None, str] = {}
        self.stopped = False

    async def between_steps(self, action: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        if self.stopped:
            raise RuntimeError("the engine stopped after an error")
        return action()


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> Base:
    return Base(load_model(checkpoint).requires_grad_(False), "tiny", checkpoint, fingerprint(checkpoint))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_AGAIN_S", 0.01)


class Life:
    """A server over a directory, and its one client's requests."""

    def __init__(self, base: Base, root: Path) -> None:
        self.base, self.root = base, root
        self.service = Service(Engine(), base, None, base.directory, ("tiny",), 4096, Store(root))  # type: ignore[arg-type]

    def killed(self, name: str = "next") -> Life:
        """Returns the server that goes on where a kill at this moment leaves the disk."""
        life = Life(self.base, left_by_a_kill(self.root, self.root.parent / name))
        resume(life.service)
        return life

    def rows(self, statement: str) -> list[Any]:
        return list(self.service.journal._rows.execute(statement))

    def directories(self) -> set[str]:
        return {found.name for found in self.service.journal.directory.glob("model-*")}

    async def result(self, request_id: str) -> bytes:
        reply = await self.service.futures.retrieve(request_id)
        return bytes(reply.body)

    async def made(self, rank: int = 2) -> tuple[Session, Run]:
        session = await self.service.begin({})
        asked = {"session_id": session.session_id, "model_seq_id": 0, "base_model": "tiny"}
        found = json.loads(await self.ask(self.service.create_model, **asked, lora_config={"rank": rank}))
        return session, self.service.sessions.run(found["model_id"])

    def begin(self, operation: Any, **asked: Any) -> str:
        body = json.dumps(asked).encode()
        request_id: str = operation(body, fields_of(body))["request_id"]
        return request_id

    async def ask(self, operation: Any, **asked: Any) -> bytes:
        return await self.result(self.begin(operation, **asked))

    def begin_step(self, run: Run, seq_id: int, rate: float = 1e-2) -> str:
        adam = {"learning_rate": rate}
        return self.begin(self.service.optim_step, model_id=run.model_id, seq_id=seq_id, adam_params=adam)

    async def step(self, run: Run, seq_id: int) -> bytes:
        return await self.result(self.begin_step(run, seq_id))

    async def begin_pass(self, run: Run, seq_id: int, loss: str = "cross_entropy") -> str:
        one = datum([40, 41], target_tokens=[41, 42], weights=[1.0, 1.0])
        kind = message("ForwardBackwardRequest")
        body = kind(model_id=run.model_id, seq_id=seq_id, data=[one], loss_fn=loss).SerializeToString()
        request_id: str = (await self.service.forward_backward(body))["request_id"]
        return request_id

    async def passed(self, run: Run, seq_id: int) -> bytes:
        return await self.result(await self.begin_pass(run, seq_id))

    async def restored(self, run: Run) -> Run:
        found = self.service.sessions.run(run.model_id)
        assert found.restoring is not None
        await found.restoring
        return found

    async def removed(self) -> None:
        await asyncio.gather(*self.service.removing)

    def refuse(
        self, monkeypatch: pytest.MonkeyPatch, refused: Callable[[Unit], bool], times: int = 10**9
    ) -> list[Unit]:
        """Has the disk refuse some units so many times; returns those refused."""
        transact, found = self.service.journal._transact, list[Unit]()

        def act(batch: list[Unit]) -> None:
            bad = [unit for unit in batch if refused(unit)]
            if bad and len(found) < times:
                found.extend(bad)
                raise sqlite3.OperationalError(FULL)
            transact(batch)

        monkeypatch.setattr(self.service.journal, "_transact", act)
        return found


def writes(unit: Unit, text: str) -> bool:
    return any(text in statement for statement, _ in unit.statements)


def lives(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asyncio.run(asyncio.wait_for(test(Life(base, tmp_path / "first"), monkeypatch), 120))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def size(run: Run) -> float:
    assert run.trained is not None
    gradients = [one.grad for one in run.trained.learner.optimizer.masters if one.grad is not None]
    return float(sum((gradient.double() ** 2).sum() for gradient in gradients))


def steps(run: Run) -> int:
    assert run.trained is not None
    return run.trained.learner.optimizer.steps


@lives
async def test_a_kill_while_a_session_ends_stops_nobody(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    (ended, _), (_, other) = await life.made(), await life.made()
    life.service.end(ended, "success")
    again = life.killed()
    assert len(again.directories()) == 2, "its rows name them until they are gone"
    assert b"optim_step" in await again.step(other, 1)
    await life.removed()
    assert len(life.directories()) == 1
    assert life.rows("SELECT COUNT(*) FROM requests") == [(1,)]


@lives
async def test_a_model_that_cannot_be_read_is_lost_alone(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, torn), (_, other) = await life.made(), await life.made()
    assert torn.kept is not None
    (torn.kept / "adapter_config.json").unlink()
    again = life.killed()
    assert b"optim_step" in await again.step(other, 1)
    assert b"is lost: it could not be taken up after the server had ended" in await again.step(torn, 1)
    last = again.killed("last")
    assert b"is lost" in await last.result(f"{torn.model_id}:1"), "as the client was told"


@lives
async def test_a_result_waits_for_the_disk_and_is_a_success(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results whose rows are refused once: nothing is noted twice, and no step that was taken is told to have failed."""
    _, run = await life.made()
    monkeypatch.setattr(service_module, "_TIMES", -1)
    for first in (1, 5):
        with monkeypatch.context() as patched:
            refused = life.refuse(patched, lambda unit: writes(unit, "INTO models"), 3)
            asked = []
            for seq_id in range(first, first + 4, 2):
                asked += [await life.begin_pass(run, seq_id), life.begin_step(run, seq_id + 1)]
            for request_id in asked:
                assert b'"error"' not in await life.result(request_id)
            assert len(refused) >= 3
    await life.removed()
    assert run.kept is not None
    assert life.directories() == {run.kept.name}
    assert life.rows("SELECT directory, seq FROM models") == [(run.kept.name, 8)]
    assert steps(await life.killed().restored(run)) == 4


@lives
async def test_passes_that_failed_do_not_run_again(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = await life.made()
    await life.passed(run, 1)
    with monkeypatch.context() as patched:
        patched.setattr(TrainedModel, "run", raising(torch.OutOfMemoryError("out of memory")))
        assert b"out of memory" in await life.passed(run, 2)
    again = await life.killed().restored(run)
    assert size(again) == size(run) > 0


def raising(error: Exception) -> Callable[..., Any]:
    def act(*_: Any, **__: Any) -> Any:
        raise error

    return act


@lives
async def test_a_repeat_that_fails_loses_its_model(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = await life.made()
    told = await life.passed(run, 1)
    with monkeypatch.context() as patched:
        patched.setattr(TrainedModel, "run", raising(torch.OutOfMemoryError("out of memory")))
        again = life.killed()
        await again.restored(run)
    assert b"is lost: it could not be taken up after the server had ended: out of memory" in await again.step(run, 2)
    assert await again.result(f"{run.model_id}:1") == told
    last = again.killed("last")
    assert size(await last.restored(run)) == size(run), "the step was told to have failed, and the pass to have not"
    assert b"is lost" in await last.result(f"{run.model_id}:2")


@lives
async def test_a_repeat_with_another_result_loses_its_model(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life.base.model, "exact", True)
    _, run = await life.made()
    await life.passed(run, 1)
    assert size(await life.killed("same").restored(run)) == size(run)
    life.rows("UPDATE requests SET sum = x'00' WHERE seq = 1")
    again = life.killed()
    assert b"request 1 has another result when it runs again" in await again.step(run, 2)


@lives
async def test_a_step_that_diverged_diverges_again(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has cleared the gradient."""
    _, run = await life.made()
    await life.passed(run, 1)
    assert run.trained is not None
    optimizer = type(run.trained.learner.optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "step", raising(DivergenceError("not finite")))
        assert b"not finite" in await life.step(run, 2)
        again = await life.killed().restored(run)
        assert (size(again), again.lost) == (0.0, None)
    lost = await life.killed("finite").restored(run)
    assert lost.lost is not None
    assert "request 2 diverged, and does not when it runs again" in lost.lost


@lives
async def test_a_step_that_breaks_off_loses_its_model(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have changed a part of the weights. After a kill they are as before it."""
    _, run = await life.made()
    await life.passed(run, 1)
    before = size(run)
    with monkeypatch.context() as patched:
        patched.setattr(TrainedModel, "step", raising(RuntimeError("no memory")))
        assert b"RuntimeError: no memory" in await life.step(run, 2)
    assert b"is lost: a step broke off: RuntimeError: no memory" in await life.passed(run, 3)
    again = await life.killed().restored(run)
    assert (steps(again), size(again)) == (0, before)


@lives
async def test_requests_of_an_engine_that_stops_run_on_the_next_server(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = await life.made()
    monkeypatch.setattr("nmoe.serve.tinker.futures.POLL_S", 0.5)
    life.service.engine.stopped = True  # type: ignore[attr-defined]
    request_id = await life.begin_pass(run, 1)
    assert b"try_again" in await life.result(request_id)
    again = life.killed()
    again.service.engine.stopped = True  # type: ignore[attr-defined]
    assert b"try_again" in await again.result(request_id), "also while the model is taken up"
    last = again.killed("last")
    monkeypatch.setattr("nmoe.serve.tinker.futures.POLL_S", 30.0)
    assert b"loss:sum" in await last.result(request_id)


@lives
async def test_a_step_without_a_gradient_is_taken_up(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_TIMES", -1)
    _, run = await life.made()
    assert b"grad_norm" in await life.step(run, 1)
    again = life.killed()
    assert b"loss:sum" in await again.passed(run, 2)
    assert steps(again.service.sessions.run(run.model_id)) == 1


@lives
async def test_a_full_disk_is_not_filled_further(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is kept once there is room; the steps go on."""
    monkeypatch.setattr(service_module, "_TIMES", -1)
    _, run = await life.made()
    left, save = life.directories(), TrainedModel.save

    def full(self: TrainedModel, directory: Path) -> None:
        save(self, directory)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(TrainedModel, "save", full)
        assert b"grad_norm" in await life.step(run, 1)
        patched.setattr(life.service.journal, "fresh_directory", raising(OSError(28, "No space left on device")))
        assert b"grad_norm" in await life.step(run, 2)
        patched.setattr(life.service.journal, "fresh_directory", raising(MemoryError("none")))
        assert b"grad_norm" in await life.step(run, 3)
    assert life.directories() == left
    assert steps(await life.killed().restored(run)) == 3
    await life.step(run, 4)
    await life.removed()
    assert life.directories() == {run.kept.name} != left if run.kept is not None else False


@lives
async def test_a_load_that_fails_changes_nothing(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    session, run = await life.made()
    await life.ask(life.service.save_weights, model_id=run.model_id, seq_id=1, path="a")
    await life.step(run, 2)
    path = f"tinker://{run.model_id}/weights/a"
    with monkeypatch.context() as patched:
        patched.setattr(TrainedModel, "save", raising(OSError(28, "No space left on device")))
        told = await life.ask(life.service.load_weights, model_id=run.model_id, seq_id=3, path=path, optimizer=True)
        assert b"No space left on device" in told
        asked = {"session_id": session.session_id, "model_seq_id": 1, "base_model": "tiny"}
        assert b"No space left on device" in await life.ask(life.service.create_model, **asked)
    assert steps(run) == 1
    assert life.service.sessions.run(f"{session.session_id}:train:1").trained is None
    await life.ask(life.service.load_weights, model_id=run.model_id, seq_id=4, path=path, optimizer=True)
    assert steps(run) == 0
    assert steps(await life.killed().restored(run)) == 0, "it is kept at once"


@lives
async def test_a_request_that_does_not_fit_holds_up_no_other(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, large), (_, small) = await life.made(), await life.made()
    with monkeypatch.context() as patched:
        life.refuse(patched, lambda unit: writes(unit, "INTO requests") and large.session_id == unit.session_id)
        refused = life.begin_step(large, 1)
        promised = asyncio.ensure_future(life.service.futures.promised(refused))
        request_id = await life.begin_pass(small, 1)
        with pytest.raises(StorageError, match=f"cannot be written: {FULL}"):
            await promised
        with pytest.raises(StorageError, match="send it again"):
            await life.service.futures.promised(refused)
        await life.service.futures.promised(request_id)
        assert b"loss:sum" in await life.result(request_id)
        with pytest.raises(TinkerError, match="knows no such request"):
            await life.result(refused)
        assert not life.service.journal._waiting
    assert steps(large) == 0
    assert b"grad_norm" in await life.step(large, 1), "it comes again"


@lives
async def test_a_row_that_no_disk_takes_holds_up_its_session_alone(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    (session, held), (_, other) = await life.made(), await life.made()
    monkeypatch.setattr("nmoe.serve.tinker.futures.POLL_S", 0.5)
    life.refuse(monkeypatch, lambda unit: writes(unit, "SET outcome") and held.session_id == unit.session_id)
    assert b"try_again" in await life.result(life.begin_step(held, 1))
    monkeypatch.setattr("nmoe.serve.tinker.futures.POLL_S", 30.0)
    assert b"grad_norm" in await life.step(other, 1)
    life.service.end(session, "success")
    await life.removed()
    assert not life.service.journal._waiting
    assert life.rows("SELECT DISTINCT session FROM requests") == [(other.session_id,)]


@lives
async def test_requests_before_one_that_failed_go_on(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three fail where the first request does not come; the kill comes when the failure of the seventh alone is on the disk."""
    session, run = await life.made()
    early = [await life.begin_pass(run, 5), life.begin_step(run, 6)]
    seventh, told = f"{run.model_id}:7", json.dumps({"error": "the request 1 before it never came"}).encode()
    request = Request(seventh, run.model_id, 7, "optim_step", b"", b"")
    taken = life.service.journal.take(request, session.session_id)
    done = life.service.journal.done(request, session.session_id, told, "application/json", 5)
    await life.service.journal.settled(taken, done)
    again = life.killed()
    order = again.service.sessions.run(run.model_id).order
    assert order.next == 5
    for request_id in early:
        assert b'"error"' not in await again.result(request_id)
    assert order.next == 8
    assert await again.result(seventh) == told
    with pytest.raises(TinkerError, match="seq_id = 4: was there already; the next is 8"):
        again.begin_step(run, 4)
    with pytest.raises(TinkerError, match="must be below"):
        again.begin_step(run, 2**62)


@lives
async def test_a_request_that_cannot_begin_again_says_why(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    session, run = await life.made()
    life.service.engine.stopped = True  # type: ignore[attr-defined]
    request_id = await life.begin_pass(run, 1)
    later = life.begin_step(run, 2)
    await life.service.futures.promised(later)
    life.rows("UPDATE requests SET body = x'ff' WHERE seq = 1")
    again = life.killed()
    told = await again.result(request_id)
    assert b"the body is no ForwardBackwardRequest" in told
    assert b"grad_norm" in await again.result(later)
    assert await again.killed("last").result(request_id) == told
    assert session.session_id in again.service.sessions.all


def test_weights_are_removed_from_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    for name, expires in (("one", None), ("two", "2000"), ("three", "2000")):
        store.save("model", "weights", name, lambda _: None, {"request": name, "expires": expires}, overwrite=False)
    monkeypatch.setattr("tempfile.mkdtemp", raising(OSError(28, "No space left on device")))
    monkeypatch.setattr(Path, "mkdir", raising(OSError(28, "No space left on device")))
    store.delete("tinker://model/weights/one")
    rename = Path.rename

    def replaced(self: Path, target: Path) -> Path:
        if self.name == "two":
            raise FileNotFoundError(self)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", replaced)
    store.expire()
    assert [found.name for found in (tmp_path / "model" / "weights").iterdir()] == ["two"]


@lives
async def test_a_damaged_journal_is_refused_and_a_full_disk_is_not(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = await life.made()
    for seq_id in range(1, 9):
        await life.step(run, seq_id)
    journal = life.service.journal
    assert journal.directory.stat().st_mode & 0o777 == 0o700, "training data are nobody else's"
    journal._rows.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = (journal.directory / "journal.sqlite").read_bytes()
    for name, content in (("torn", whole[:4096] + bytes(len(whole) - 4096)), ("none", b"no database" * 1000)):
        (life.root / name).mkdir()
        (life.root / name / "journal.sqlite").write_bytes(content)
        with pytest.raises(UserError, match=r"its journal is damaged: .*; move the directory away"):
            Journal(life.root / name)
    journal._rows.execute("PRAGMA user_version = 7")
    with pytest.raises(UserError, match="its journal is of version 7, and this nmoe writes 1"):
        life.killed("newer")
    monkeypatch.setattr(journal_module.sqlite3, "connect", raising(sqlite3.OperationalError(FULL)))
    with pytest.raises(StorageError, match=f"cannot be written: {FULL}"):
        Journal(life.root / "full")


@lives
async def test_a_session_that_ends_leaves_nothing(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an action that was under way writes for it, nor one that waits."""
    monkeypatch.setattr(service_module, "_TIMES", -1)
    session, run = await life.made()
    ready, between = asyncio.Event(), life.service.engine.between_steps

    async def slow(act: Callable[[], Any]) -> Any:
        await ready.wait()
        return await between(act)

    monkeypatch.setattr(life.service.engine, "between_steps", slow)
    life.begin_step(run, 1)
    await life.service.journal.flush()
    await asyncio.sleep(0.01)
    life.service._keep(run, run.model())  # as the engine's thread does at that moment
    assert len(life.directories()) == 2
    life.service.end(session, "success")
    ready.set()
    await life.removed()
    assert life.directories() == set()
    with pytest.raises(TinkerError, match="its session has ended, or it was unloaded"):
        life.service.timed(run, "optim_step", dict)


@lives
async def test_sessions_whose_clients_gave_up_end_at_the_start(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    (old, _), (_, run) = await life.made(), await life.made()
    old.seen -= 61
    old.noted -= 122
    life.rows("UPDATE sessions SET seen = seen - 4000")
    life.service.heard(run.session_id)
    assert not life.service.journal._waiting, "it was noted just now"
    life.service.sessions.all[run.session_id].noted -= 61
    life.service.heard(run.session_id)
    await life.service.journal.flush()
    again = life.killed()
    assert list(again.service.sessions.all) == [run.session_id]
    assert len(again.directories()) == 1


@lives
async def test_an_unloaded_model_leaves_its_results_alone(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = await life.made()
    told = await life.passed(run, 1)
    assert life.rows("SELECT COUNT(body) FROM requests") == [(1,)]
    request_id = life.begin(life.service.unload_model, model_id=run.model_id)
    await life.result(request_id)
    await life.removed()
    assert life.directories() == set()
    assert life.rows("SELECT COUNT(body) FROM requests") == [(0,)]
    assert life.rows("SELECT COUNT(*) FROM models") == [(0,)]
    again = life.killed()
    assert await again.result(f"{run.model_id}:1") == told
    with pytest.raises(TinkerError, match="there is no model"):
        again.service.sessions.run(run.model_id)


@lives
async def test_a_model_is_kept_by_time_and_by_bytes(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = await life.made()
    first = run.kept
    run.keeping_s = 1e9
    await life.step(run, 1)
    assert (run.kept, list(run.unkept)) == (first, [1])
    assert run.since_s > 0
    assert dict((await life.killed().restored(run)).unkept) == run.unkept
    run.keeping_s, run.since_s = 1.0, 2.0
    await life.step(run, 2)
    assert run.kept == first
    monkeypatch.setattr(service_module, "_MANY_BYTES", 10)
    await life.step(run, 3)
    assert run.kept != first
    assert run.unkept == {}
    assert 0 < run.keeping_s < 60
    assert life.rows("SELECT COUNT(body) FROM requests") == [(0,)]
    monkeypatch.setattr(service_module, "_MOST_BYTES", 50)
    with pytest.raises(TinkerError, match=r"passes of [\d,]+ bytes without a step; at most 50 are kept"):
        await life.passed(run, 4)


@lives
async def test_sessions_of_other_numbers_wait_for_their_server(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = await life.made()
    monkeypatch.setattr(life.base.model, "exact", True)
    again = life.killed()
    assert not again.service.sessions.all
    assert again.rows("SELECT id FROM sessions") == [(session.session_id,)]
    monkeypatch.setattr(life.base.model, "exact", False)
    assert list(again.killed("last").service.sessions.all) == [session.session_id]


@lives
async def test_dropped_results_are_dropped_on_disk(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = await life.made()
    await life.step(run, 1)
    monkeypatch.setattr("nmoe.serve.tinker.futures._KEPT_BYTES", 1500)
    await life.step(run, 2)
    await life.service.journal.flush()
    found = life.rows("SELECT seq, media, outcome NOTNULL FROM requests ORDER BY seq")
    assert found == [(0, "forgotten", 0), (1, "forgotten", 0), (2, "application/json", 1)]


@lives
async def test_rows_of_a_request_are_as_they_were_noted(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = life.service.journal
    one = Request("model:1", "model", 1, "optim_step", b"digest", b"body")
    unit = journal.take(one, "session")
    journal.take(Request("model:1", "model", 1, "optim_step", b"other", b"other"), "session")
    await journal.settled(unit)
    journal.done(one, "session", b"result", "application/json", 2, again=True)
    await journal.flush()
    (row,) = journal.requests("session")
    assert (row.digest, row.body_bytes, row.media, row.next, row.diverged) == (b"digest", 4, "application/json", 2, 0)
    assert (journal.body("model:1"), journal.outcome("model:1")) == (b"body", b"result")


@lives
async def test_a_whole_model_is_taken_up(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and steps since it was kept run again, and its samplers have its values."""
    monkeypatch.setattr(service_module, "_TIMES", 1e9)
    session, run = await life.made(rank=0)
    await life.passed(run, 1)
    await life.step(run, 2)
    asked = {"model_id": run.model_id, "seq_id": 3, "sampling_session_seq_id": 0}
    await life.ask(life.service.save_weights_for_sampler, **asked)
    await life.passed(run, 4)
    again = life.killed()
    found = await again.restored(run)
    assert found.lost is None
    assert steps(found) == steps(run) == 1
    assert size(found) == size(run) > 0
    assert found.trained is not None
    assert run.trained is not None
    now, before = found.trained.values(), run.trained.values()
    assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True))
    sampler = again.service.sessions.sampler(f"{session.session_id}:sample:0")
    assert sampler.shape == Shape(0)
    assert sampler.held is not None
    assert all(torch.equal(one, other) for one, other in zip(sampler.held.read(), before, strict=True))


@lives
async def test_a_client_that_goes_in_the_middle_of_a_body_begins_nothing(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = await life.made()
    parts = [{"type": "http.request", "body": b'{"model_id"', "more_body": True}, {"type": "http.disconnect"}]
    sent = list[Any]()

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/api/v1/optim_step", "headers": [], "query_string": b""}
    await application(Server(life.service))(scope, receive, send)
    assert sent[0]["status"] == 499
    assert run.order.next == 1
    assert life.rows("SELECT COUNT(*) FROM requests") == [(1,)]


@lives
async def test_requests_that_are_done_hold_no_bodies(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results may be asked for again, and they may be large."""
    _, run = await life.made()
    tracemalloc.start()
    try:
        held = []
        for seq_id in range(1, 9):
            await life.result(await life.begin_pass(run, seq_id, loss="x" * 2**20))
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] - held[1] < 2**20
