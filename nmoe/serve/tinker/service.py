"""The operations of Tinker's protocol over one base: training in the order of sequence ids, and sampling. What clients have been
promised lies in the journal first."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import DivergenceError, StorageError
from nmoe.learner.objectives import Objective
from nmoe.parsing import MOST_NESTED, is_deep
from nmoe.runs.storage import storage_errors, sync
from nmoe.serve.tinker.data import PassRequest, parsed, read_pass
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.fields import Fields, fields_of
from nmoe.serve.tinker.futures import Futures, Record, Result, ServerEndsError, failed
from nmoe.serve.tinker.journal import UNLOAD, Journal, Request, Row, Unit
from nmoe.serve.tinker.losses import check_inputs, read_loss
from nmoe.serve.tinker.models import TrainedModel
from nmoe.serve.tinker.order import Order
from nmoe.serve.tinker.samplers import Held, Sampler, Slots
from nmoe.serve.tinker.sampling import MOST_SAMPLES, read_sample_request, sample
from nmoe.serve.tinker.sessions import Run, Session, Sessions
from nmoe.serve.tinker.store import Kind, Saved, Store, expiry, now
from nmoe.serve.tinker.weights import Base, Shape, read_values, shape_of
from nmoe.text.tokenizer import Tokenizer

Asked = dict[str, Any]
R = TypeVar("R")

_MOST_TTL_S = 10 * 365 * 24 * 3600
_MOST_METADATA = 64 * 2**10
# A model is kept after a step if so many times as long has been trained since it was kept last, so that writing takes at most a
# tenth of the time, and what runs again after a kill has taken ten times as long as writing, and one step.
_TIMES = 10
_SEEN_EVERY_S = 60.0

# From so many bytes of requests on a model is kept as soon as it was trained for as long as writing it takes, and none is taken any
# more from so many: they are on the disk, and run again after a kill.
_MANY_BYTES, _MOST_BYTES = 2**30, 2**33

_LEAST_EPS = 1e-30

# Those that change a model run again after a kill, if the model was not kept since. After `load_weights` it always is.
_CHANGES = ("forward_backward", "optim_step")
_PASSES = ("forward", "forward_backward")


@dataclass
class _Done:
    """What a request leaves beside its result: whether it changed its model, as one does that succeeded or diverged; where the
    model was kept; and values that stay until the rows are written that no longer name them."""

    changed: bool = False
    diverged: bool = False
    kept: Path | None = None
    before: Held | None = None


def _tried(act: Callable[[], R]) -> R | Exception:
    try:
        return act()
    except Exception as error:
        return error


def _passed(run: Run, checked: tuple[PassRequest, Objective] | TinkerError) -> bytes:
    if isinstance(checked, TinkerError):
        raise checked
    return run.model().run(*checked)


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def metadata_of(fields: Fields) -> Any:
    """Returns what a client says about a session, a model or weights. Raises TinkerError for more than is kept."""
    given = fields.raw("user_metadata")
    if is_deep(given):  # what one call can write, one with a longer stack may not read
        raise TinkerError(f"user_metadata: is nested more than {MOST_NESTED} deep")
    if (size := len(json.dumps(given))) > _MOST_METADATA:
        raise TinkerError(f"user_metadata: has {size:,} bytes as JSON; at most {_MOST_METADATA:,} are kept")
    return given


@dataclass
class Service:
    """One base, its engine, and everybody's models and samplers. Used on the event loop's thread only."""

    engine: NativeEngine
    base: Base
    tokenizer: Tokenizer
    tokenizer_directory: Path
    names: tuple[str, ...]
    context_tokens: int
    store: Store

    def __post_init__(self) -> None:
        self.journal = Journal(self.store.state)
        self.journal.end_old()
        self.journal.tidy()
        self.store.mend()
        self.sessions, self.futures = Sessions(), Futures(self.journal.forget)
        self._slots = Slots(self.engine, self.base)
        # Samplers of saved weights, by their path and the time of saving, since weights of one path can be replaced.
        self._of_saved = WeakValueDictionary[tuple[str, str], Sampler]()
        self.removing = set[asyncio.Task[None]]()

    @property
    def key(self) -> str:
        """The base of a session in the journal: only servers whose numbers are the same take it up."""
        return f"{self.base.fingerprint} {self.base.numbers}"

    async def begin(self, about: dict[str, Any]) -> Session:
        """Begins a session, and returns it once it is on the disk. Raises StorageError if the disk refuses it."""
        session = self.sessions.begin(about)
        try:
            await self.journal.settled(self.journal.begin_session(session.session_id, self.key, about))
        except StorageError:
            self.end(session, "it could not be written")
            raise
        return session

    def heard(self, session_id: str) -> None:
        """Notes that a session's client lives. Raises TinkerError for one that does not run."""
        session = self.sessions.live(session_id)
        if session.noted < session.seen - _SEEN_EVERY_S:
            session.noted = session.seen
            self.journal.seen(session_id)

    def end(self, session: Session, reason: str) -> None:
        """Ends a session, and its requests."""
        runs = [run for model_id in session.models if (run := self.sessions.runs.get(model_id)) is not None]
        self.sessions.end(session, reason)
        self.futures.end(session.session_id)
        self._ended(self.journal.end_session(session.session_id), *runs)

    def _ended(self, unit: Unit, *runs: Run) -> None:
        """Ends models. Their files go once a unit is on the disk, after which no row names them."""
        for run in runs:
            run.ended = True
            if run.restoring is not None:
                run.restoring.cancel()

        async def remove() -> None:
            await self.journal.written(unit)
            with suppress(Exception):  # else the process ends, and the next one tidies
                await self.engine.between_steps(lambda: None)  # an action that has begun may write
            for run in runs:
                await asyncio.to_thread(_remove, run, *run.directories)

        self._beside(remove())

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.removing.add(task)
        task.add_done_callback(self.removing.discard)

    def sweep(self) -> None:
        """Ends the sessions of clients that have died, and drops old sessions and results."""
        for session in self.sessions.silent():
            self.end(session, "its client has been silent for too long")
        self.sessions.forget()
        self.futures.forget()

    def check_base(self, name: str) -> None:
        """Raises TinkerError (404) for another model than the one that is served."""
        if name not in self.names and Path(name).resolve() != self.base.directory.resolve():
            raise TinkerError(f"base_model {name!r} is not served here; there is {', '.join(self.names)}", 404)

    def create_model(self, body: bytes, fields: Fields) -> Asked:
        """Begins a new adapter, or a copy of the base that is trained as a whole."""
        session = self.sessions.live(fields.text("session_id"))
        model_id = f"{session.session_id}:train:{fields.whole('model_seq_id')}"
        if self.futures.known(f"{model_id}:0", digest(body)):
            return self._promise(f"{model_id}:0", model_id)
        self.check_base(fields.text("base_model"))
        _check_optimizer(fields)
        shape = _shape_of(fields, model_id)
        metadata = metadata_of(fields)
        return self._new_run(
            session, model_id, shape, body, metadata, lambda: TrainedModel(self.base, shape), "create_model"
        )

    def _new_run(
        self,
        session: Session,
        model_id: str,
        shape: Shape,
        body: bytes,
        metadata: Any,
        make: Callable[[], TrainedModel],
        kind: str,
    ) -> Asked:
        # Its turn comes before sequence id 1, so that the first pass waits for the model.
        run, done = Run(model_id, session.session_id, Order(0), shape, last_request=now()), _Done()
        self.sessions.add_run(session, run)

        def act() -> Asked:
            model = make()
            about = {"base_model": self.base.name, "lora_rank": shape.rank, "time": now(), "user_metadata": metadata}
            about |= {"train_attn": shape.attention, "train_mlp": shape.mlp}
            self.store.note_run(model_id, about)
            self._replace(run, model, done)
            return {"type": kind, "model_id": model_id}

        self._start(run, Request(f"{model_id}:0", model_id, 0, kind, digest(body), body), act, None, done)
        return self._promise(f"{model_id}:0", model_id)

    def _replace(self, run: Run, model: TrainedModel, done: _Done) -> None:
        """Gives a run a model that was made or loaded, once it is kept: where that fails nothing has changed."""
        done.kept = self._keep(run, model)
        run.trained = model

    def _start(
        self,
        run: Run,
        request: Request,
        act: Callable[[], Result],
        then: Callable[[Result], None] | None,
        done: _Done,
    ) -> None:
        unit = self.journal.take(request, run.session_id)
        work = self._in_turn(run, request, act, then, done)
        self.futures.start(
            request.request_id,
            run.session_id,
            request.digest,
            work,
            lambda: self.journal.settled(unit),
            self._record(run, request, done),
        )

    async def _in_turn(
        self,
        run: Run,
        request: Request,
        act: Callable[[], Result],
        then: Callable[[Result], None] | None,
        done: _Done,
    ) -> Result:
        """Does something on the engine's thread when the model's earlier requests are done, and `then` something here."""
        try:
            await run.order.turn(request.seq_id)
            if run.restoring is not None:
                await asyncio.shield(run.restoring)
            if request.kind in _CHANGES:
                run.unkept[request.seq_id] = len(request.body)
            times = 1 if sum(run.unkept.values()) > _MANY_BYTES else _TIMES
            try:
                result = await self.between_steps(lambda: self._kept(run, request.kind, act, times, done))
            except DivergenceError:
                # A step that diverged has cleared the gradient.
                done.diverged = done.changed = request.kind == "optim_step"
                raise
            done.changed = request.kind in _CHANGES
            if then is not None:
                done.before = None if run.in_flight is None else run.in_flight.held
                then(result)
            return result
        finally:
            run.last_request = now()
            await run.order.done(request.seq_id)

    async def between_steps(self, act: Callable[[], R]) -> R:
        """Calls a function on the engine's thread, and passes on its result or exception. Raises ServerEndsError if the engine has
        stopped."""
        try:
            result = await self.engine.between_steps(lambda: _tried(act))
        except Exception as error:
            raise ServerEndsError("the engine has stopped, and the server with it") from error
        if not isinstance(result, Exception):
            return result
        try:
            raise result
        finally:
            del result  # it holds this frame

    @staticmethod
    def timed(run: Run, kind: str, act: Callable[[], R]) -> R:
        """Does something, and counts the time for which the model was trained. Raises TinkerError once it has ended."""
        if run.ended:
            raise TinkerError(f"model {run.model_id}: its session has ended, or it was unloaded", 410)
        began = time.perf_counter()
        try:
            return act()
        finally:
            if kind in _CHANGES:
                run.since_s += time.perf_counter() - began

    def _kept(self, run: Run, kind: str, act: Callable[[], Result], times: int, done: _Done) -> Result:
        """Does something, and keeps the model if so many times as long was trained as it takes."""
        result = self.timed(run, kind, act)
        if kind == "optim_step" and run.since_s >= times * run.keeping_s:
            try:
                done.kept = self._keep(run, run.model())
            except Exception as error:  # the step is done; after a kill it runs again
                print(f"model {run.model_id}: was not kept: {error}", file=sys.stderr, flush=True)
        return result

    def _keep(self, run: Run, model: TrainedModel) -> Path:
        """Writes a model as it is now, or nothing."""
        began = time.perf_counter()
        try:
            with storage_errors(self.journal.directory):
                directory = self.journal.fresh_directory()
                run.directories.add(directory)
                try:
                    model.save(directory)
                    for file in (*directory.iterdir(), directory, directory.parent):
                        sync(file)
                except BaseException:
                    _remove(run, directory)
                    raise
                return directory
        finally:
            # Also after a failure, so that a full disk takes no more of the training's time.
            run.keeping_s, run.since_s = time.perf_counter() - began, 0.0

    def _record(self, run: Run, request: Request, done: _Done) -> Record:
        async def record(content: bytes, media_type: str) -> None:
            again = done.changed and done.kept is None
            if not again:
                run.unkept.pop(request.seq_id, None)
            before = None
            if done.kept is not None:
                before, run.kept = run.kept, done.kept
                run.unkept = {seq_id: size for seq_id, size in run.unkept.items() if seq_id > request.seq_id}
            unit = self.journal.done(
                request,
                run.session_id,
                content,
                media_type,
                run.order.next,
                again,
                done.diverged,
                None if done.kept is None else done.kept.name,
            )
            await self.journal.written(unit)
            done.before = None
            if before is not None:
                self._beside(asyncio.to_thread(_remove, run, before))

        return record

    def _ordered(
        self,
        run: Run,
        seq_id: int,
        kind: str,
        key: bytes,
        body: bytes,
        act: Callable[[], Result],
        then: Callable[[Result], None] | None = None,
        done: _Done | None = None,
    ) -> Asked:
        """Begins a request of a model, or finds it if it came before. `key` is the digest of its body."""
        request_id = f"{run.model_id}:{seq_id}"
        if not self.futures.known(request_id, key):
            run.order.check(seq_id)
            self.heard(run.session_id)
            if kind in _CHANGES and (size := sum(run.unkept.values()) + len(body)) > _MOST_BYTES:
                raise TinkerError(
                    f"passes of {size:,} bytes without a step; at most {_MOST_BYTES:,} are kept for a model"
                )
            request = Request(request_id, run.model_id, seq_id, kind, key, body)
            self._start(run, request, act, then, _Done() if done is None else done)
        return self._promise(request_id, run.model_id)

    @staticmethod
    def _promise(request_id: str, model_id: str) -> Asked:
        return {"request_id": request_id, "model_id": model_id}

    async def forward_backward(self, body: bytes) -> Asked:
        """Begins a pass. Data that no model takes fail in their turn, since the client counts on."""
        addressed, key = await asyncio.to_thread(lambda: (parsed(body), digest(body)))
        run = self.sessions.run(addressed.model_id)
        checked = await asyncio.to_thread(self._checked, addressed)
        kind = "forward" if addressed.forward_only else "forward_backward"
        return self._ordered(run, addressed.seq_id, kind, key, body, lambda: _passed(run, checked))

    def act_of(self, run: Run, kind: str, body: bytes) -> Callable[[], Result]:
        """Returns what a pass or a step does on the engine's thread."""
        if kind == "optim_step":
            return self._step(run, fields_of(body))
        return lambda: _passed(run, self._checked(parsed(body)))

    def begin_again(self, row: Row) -> None:
        """Begins a training request that was taken before this process. Raises TinkerError or UserError for one that cannot."""
        body = self.journal.body(row.request_id)
        if row.kind in _PASSES:
            run = self.sessions.run(row.model_id)
            self._ordered(run, row.seq_id, row.kind, row.digest, body, self.act_of(run, row.kind, body))
        else:
            begins: Callable[..., Asked] = getattr(self, row.kind)
            begins(body, fields_of(body), **({"again": True} if row.kind == "save_weights_for_sampler" else {}))

    def refuse(self, row: Row, session_id: str, error: Exception) -> None:
        """Puts back the failure of a request that was taken before this process and cannot begin again."""
        content, media_type = failed(error)
        self.futures.put_back(row.request_id, session_id, row.digest, content, media_type)
        following = row.seq_id + 1
        if (run := self.sessions.runs.get(row.model_id)) is not None:
            run.order.skip(row.seq_id)
            following = run.order.next
        request = Request(row.request_id, row.model_id, row.seq_id, row.kind, row.digest, b"")
        self.journal.done(request, session_id, content, media_type, following)

    def _checked(self, sent: Any) -> tuple[PassRequest, Objective] | TinkerError:
        """Returns what a message asks for, or why no model takes it."""
        try:
            request = read_pass(sent, self.base.model.config.vocab_size, self.context_tokens)
            objective = read_loss(request.loss, request.settings)
            check_inputs(request.data, request.loss)
        except TinkerError as error:
            return error.with_traceback(None)
        return request, objective

    def optim_step(self, body: bytes, fields: Fields) -> Asked:
        run = self.sessions.run(fields.text("model_id"))
        return self._ordered(run, fields.whole("seq_id"), "optim_step", digest(body), body, self._step(run, fields))

    @staticmethod
    def _step(run: Run, fields: Fields) -> Callable[[], Asked]:
        def act() -> Asked:
            if fields.has("optimizer_params"):
                kind = fields.table("optimizer_params").text("type", "")
                raise TinkerError(f"optimizer_params.type = {kind!r}: this server has adamw alone")
            given = fields.table("adam_params")
            params = {
                "learning_rate": given.number("learning_rate", 1e-4),
                "beta1": given.number("beta1", 0.9, below=1),
                "beta2": given.number("beta2", 0.95, below=1),
                # With 0, also in fp32, a weight without a gradient so far would become 0 / 0.
                "eps": given.number("eps", 1e-12, least=_LEAST_EPS),
                "weight_decay": given.number("weight_decay", 0.0),
                "grad_clip_norm": given.number("grad_clip_norm", 0.0),
            }
            model = run.model()
            try:
                return model.step(params)
            except DivergenceError:
                raise
            except Exception as error:  # it may have changed a part of the weights
                run.trained, run.lost = None, f"a step broke off: {type(error).__name__}: {error}"
                raise

        return act

    def save_weights(self, body: bytes, fields: Fields) -> Asked:
        run, seq_id = self.sessions.run(fields.text("model_id")), fields.whole("seq_id")
        name = fields.text("path", None) or f"{seq_id:08}"

        def act() -> Asked:
            saved = self._save(run, seq_id, "weights", name, run.model().save, fields)
            return {"type": "save_weights", "path": saved.path}

        return self._ordered(run, seq_id, "save_weights", digest(body), body, act)

    def _save(
        self, run: Run, seq_id: int, kind: Kind, name: str, write: Callable[[Path], None], fields: Fields
    ) -> Saved:
        ttl = fields.whole("ttl_seconds", None, least=1, most=_MOST_TTL_S)
        about = {"user_metadata": metadata_of(fields), "expires": expiry(ttl), "request": f"{run.model_id}:{seq_id}"}
        # Weights to sample from are replaced: their request has no such flag.
        overwrite = kind == "sampler_weights" or fields.flag("overwrite")
        return self.store.save(run.model_id, kind, name, write, about, overwrite)

    def save_weights_for_sampler(self, body: bytes, fields: Fields, again: bool = False) -> Asked:
        """Saves weights to sample from: under a name on disk, or for a sampling session. If it runs `again` after a kill, the
        sampler may be there."""
        run, seq_id = self.sessions.run(fields.text("model_id")), fields.whole("seq_id")
        session = self.sessions.live(run.session_id)
        name = fields.text("path", None)
        number = fields.whole("sampling_session_seq_id", None)
        in_flight = fields.text("kind", "snapshot") == "inflight"
        held = list[Held]()

        def write(directory: Path) -> None:
            model = run.model()
            model.save_for_sampling(directory)
            if model.shape.whole:
                self.tokenizer.save(directory)

        def act() -> Asked:
            if name is not None or number is None:
                saved = self._save(run, seq_id, "sampler_weights", name or f"{seq_id:08}", write, fields)
                return {"type": "save_weights_for_sampler", "path": saved.path}
            held.append(Held.written(run.model().values(), self.journal.directory))
            return {"type": "save_weights_for_sampler", "sampling_session_id": f"{session.session_id}:sample:{number}"}

        def then(reply: Result) -> None:
            if isinstance(reply, dict) and "sampling_session_id" in reply:
                if not again and reply["sampling_session_id"] in self.sessions.samplers:
                    raise _taken(number)
                sampler = run.sampler(in_flight)
                before, (sampler.held,) = sampler.held, held
                self._slots.moved(sampler)
                self._add_sampler(session, reply["sampling_session_id"], sampler, run.model_id if in_flight else None)
                if before is not None:
                    self.journal.move_samplers(session.session_id, before.file.name, sampler.held.file.name)

        return self._ordered(run, seq_id, "save_weights_for_sampler", digest(body), body, act, then)

    def _add_sampler(self, session: Session, sampler_id: str, sampler: Sampler, model_id: str | None = None) -> Unit:
        """Adds a sampler to a session; with a model one that its saves move."""
        self.sessions.add_sampler(session, sampler_id, sampler)
        shape, held = sampler.shape, sampler.held
        of = (None, None, None) if shape is None else (shape.rank, shape.attention, shape.mlp)
        file = None if held is None else held.file.name
        return self.journal.add_sampler(sampler_id, session.session_id, model_id, *of, file, sampler.path)

    def load_weights(self, body: bytes, fields: Fields) -> Asked:
        """Loads saved weights into a model, or makes the model that they are of."""
        path, optimizer = fields.text("path"), fields.flag("optimizer")
        _check_optimizer(fields)
        if fields.has("model_id"):
            run, done = self.sessions.run(fields.text("model_id")), _Done()

            def act() -> Asked:
                found = self.store.find(path, "weights").directory
                self._replace(run, TrainedModel(self.base, run.model().shape, found, optimizer), done)
                return {"type": "load_weights", "path": path, "model_id": run.model_id}

            return self._ordered(run, fields.whole("seq_id"), "load_weights", digest(body), body, act, None, done)
        session = self.sessions.live(fields.text("session_id"))
        model_id = f"{session.session_id}:train:{fields.whole('model_seq_id')}"
        if self.futures.known(f"{model_id}:0", digest(body)):
            return self._promise(f"{model_id}:0", model_id)
        if fields.has("base_model"):
            self.check_base(fields.text("base_model"))
        directory = self.store.find(path, "weights").directory
        shape, metadata = shape_of(directory), metadata_of(fields)

        def make() -> TrainedModel:
            return TrainedModel(self.base, shape, directory, optimizer)

        return self._new_run(session, model_id, shape, body, metadata, make, "load_weights")

    def unload_model(self, body: bytes, fields: Fields) -> Asked:
        """Frees a model once the requests that have come are done."""
        model_id = fields.text("model_id")
        request_id, key = f"{model_id}:unload", digest(body)
        if not self.futures.known(request_id, key):
            run = self.sessions.run(model_id)
            request = Request(request_id, model_id, UNLOAD, "unload_model", key, body)
            unit = self.journal.take(request, run.session_id)

            async def record(content: bytes, media_type: str) -> None:
                unit = self.journal.unloaded(request, run.session_id, content, media_type)
                self._ended(unit, run)
                await self.journal.written(unit)

            work = self._unload(run)
            self.futures.start(request_id, run.session_id, key, work, lambda: self.journal.settled(unit), record)
        return self._promise(request_id, model_id)

    async def _unload(self, run: Run) -> Result:
        await run.order.idle()
        self.sessions.runs.pop(run.model_id, None)
        return {"type": "unload_model", "model_id": run.model_id}

    async def create_sampling_session(self, fields: Fields) -> Asked:
        session = self.sessions.live(fields.text("session_id"))
        number = fields.whole("sampling_session_seq_id")
        sampler_id = f"{session.session_id}:sample:{number}"
        if (sampler := self.sessions.samplers.get(sampler_id)) is None:
            sampler = await self._sampler_of(fields)
        elif sampler.path != fields.text("model_path", None) or (sampler.path is None and sampler.shape is not None):
            raise _taken(number)
        # The session may have ended meanwhile. One that comes again may not have been written.
        await self.journal.settled(self._add_sampler(self.sessions.live(session.session_id), sampler_id, sampler))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def _sampler_of(self, fields: Fields) -> Sampler:
        """Returns a sampler of the base, or of saved weights."""
        path = fields.text("model_path", None)
        if path is None:
            self.check_base(fields.text("base_model"))
            return Sampler()
        saved = self.store.find(path)
        key = saved.path, str(saved.about["time"])
        if (known := self._of_saved.get(key)) is not None:
            return known

        def read() -> Sampler:
            shape, values = read_values(self.base, saved.directory)
            return Sampler(shape, Held.written(values, self.journal.directory), saved.path)

        self._of_saved[key] = sampler = await self.engine.between_steps(read)
        return sampler

    async def asample(self, body: bytes, fields: Fields) -> Asked:
        """Begins a request for samples."""
        if fields.has("sampling_session_id"):
            sampler_id = fields.text("sampling_session_id")
            sampler = self.sessions.sampler(sampler_id)
        else:
            # Without a number it may ask for other samples of the same prompt.
            alone = digest(body).hex()[:24] if fields.has("seq_id") else secrets.token_hex(12)
            sampler_id, sampler = f"alone-{alone}", await self._sampler_of(fields)
        request_id = f"{sampler_id}:{fields.whole('seq_id', 0)}"
        count = fields.whole("num_samples", 1, least=1, most=MOST_SAMPLES)
        if not self.futures.known(request_id, digest(body)):
            self.futures.start(
                request_id, sampler_id.partition(":")[0], digest(body), self._sampled(sampler, fields, request_id)
            )
        ids = [f"{request_id}:{index}" for index in range(count)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def _sampled(self, sampler: Sampler, fields: Fields, request_id: str) -> Result:
        asked = await asyncio.to_thread(read_sample_request, fields, self.tokenizer, self.context_tokens)
        async with self._slots.of(sampler) as adapter:
            return await sample(self.engine, self.tokenizer, asked, request_id, adapter)


def _taken(number: int) -> TinkerError:
    return TinkerError(f"sampling_session_seq_id = {number}: there is another sampler of this number; count on")


def _shape_of(fields: Fields, model_id: str) -> Shape:
    """Returns what a client wants to train: an adapter, or the whole model, of rank 0 or without a `lora_config`."""
    lora = fields.table("lora_config", None)
    rank = lora.whole("rank", 0, most=4096)
    parts = {name: lora.flag(name, True) for name in ("train_attn", "train_mlp", "train_unembed")}
    if rank == 0:
        if left := [name for name, trained in parts.items() if not trained]:
            raise TinkerError(f"lora_config.{left[0]} = false: rank 0 trains the whole model; leave it true")
        return Shape(0)
    seed = lora.whole("seed", None, least=-(2**63))
    drawn = int.from_bytes(digest(model_id.encode())[:4]) if seed is None else seed % 2**31
    return Shape(rank, parts["train_attn"], parts["train_mlp"], drawn)


def _remove(run: Run, *directories: Path) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
        run.directories.discard(directory)


def _check_optimizer(fields: Fields) -> None:
    kind = fields.table("optimizer_config", None).text("type", "adamw")
    if kind != "adamw":
        raise TinkerError(f"optimizer_config.type = {kind!r}: this server has adamw alone")
