"""The operations of Tinker's protocol over one base: training in the order of sequence ids, and sampling. What clients have been
promised lies in the journal first."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import StorageError
from nmoe.learner.objectives import Objective
from nmoe.runs.storage import storage_errors, sync
from nmoe.serve.tinker.data import PassRequest, parsed, read_pass
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.fields import Fields, fields_of
from nmoe.serve.tinker.futures import Futures, Record, Result
from nmoe.serve.tinker.journal import UNLOAD, Journal, Request
from nmoe.serve.tinker.losses import check_inputs, read_loss
from nmoe.serve.tinker.models import Base, Shape, TrainedModel, read_values, shape_of
from nmoe.serve.tinker.order import Order
from nmoe.serve.tinker.samplers import Held, Sampler, Slots
from nmoe.serve.tinker.sampling import MOST_SAMPLES, read_sample_request, sample
from nmoe.serve.tinker.sessions import Run, Session, Sessions
from nmoe.serve.tinker.store import Kind, Saved, Store, expiry, now
from nmoe.text.tokenizer import Tokenizer

Asked = dict[str, Any]

_MOST_TTL_S = 10 * 365 * 24 * 3600
_MOST_METADATA = 64 * 2**10
# A model is kept after a step if so many times as long has been trained since it was kept last, so that writing takes at most a
# tenth of the time, and what runs again after a kill has taken ten times as long as writing, and one step.
_TIMES = 10
_SEEN_EVERY_S = 60.0

# Those that change a model run again after a kill, if the model was not kept since.
_CHANGES = ("load_weights", "forward_backward", "optim_step")
_PASSES = ("forward", "forward_backward")


@dataclass
class _Done:
    """What a request leaves beside its result: whether it has to run again after a kill, where its model was kept, and values that
    stay until the rows are written that no longer name them."""

    again: bool = False
    kept: Path | None = None
    before: Held | None = None


def _remove(directory: Path | None) -> None:
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def _passed(run: Run, checked: tuple[PassRequest, Objective] | TinkerError) -> bytes:
    if isinstance(checked, TinkerError):
        raise checked
    return run.model().run(*checked)


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def metadata_of(fields: Fields) -> Any:
    """Returns what a client says about a session, a model or weights. Raises TinkerError for more than is kept."""
    given = fields.raw("user_metadata")
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
        self.journal.tidy()
        self.store.mend()
        self.sessions, self.futures = Sessions(), Futures(self.journal.forget)
        self._slots = Slots(self.engine, self.base)
        # Samplers of saved weights, by their path and the time of saving, since weights of one path can be replaced.
        self._of_saved = WeakValueDictionary[tuple[str, str], Sampler]()

    def begin(self, about: dict[str, Any]) -> Session:
        """Begins a session."""
        session = self.sessions.begin(about)
        self.journal.begin_session(session.session_id, self.base.fingerprint, about)
        return session

    def heard(self, session_id: str) -> None:
        """Notes that a session's client lives. Raises TinkerError for one that does not run."""
        session = self.sessions.live(session_id)
        if session.noted < session.seen - _SEEN_EVERY_S:
            session.noted = session.seen
            self.journal.seen(session_id)

    def end(self, session: Session, reason: str) -> None:
        """Ends a session, and its requests."""
        kept = [run.kept for model_id in session.models if (run := self.sessions.runs.get(model_id)) is not None]
        self.sessions.end(session, reason)
        self.futures.end(session.session_id)
        self.journal.end_session(session.session_id)
        for directory in kept:
            _remove(directory)

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
        """Begins a new adapter."""
        session = self.sessions.live(fields.text("session_id"))
        model_id = f"{session.session_id}:train:{fields.whole('model_seq_id')}"
        if self.futures.known(f"{model_id}:0", digest(body)):
            return self._promise(f"{model_id}:0", model_id)
        self.check_base(fields.text("base_model"))
        _check_optimizer(fields)
        lora = fields.table("lora_config", None)
        rank = lora.whole("rank", 32, most=4096)
        if rank == 0:
            raise TinkerError("lora_config.rank = 0: this server trains adapters, and not whole models")
        seed = lora.whole("seed", None, least=-(2**63))
        shape = Shape(
            rank,
            lora.flag("train_attn", True),
            lora.flag("train_mlp", True),
            int.from_bytes(digest(model_id.encode())[:4]) if seed is None else seed % 2**31,
        )
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
        run = Run(model_id, session.session_id, Order(0), shape, last_request=now())
        self.sessions.add_run(session, run)

        def act() -> Asked:
            run.trained = make()
            about = {"base_model": self.base.name, "lora_rank": shape.rank, "time": now(), "user_metadata": metadata}
            about |= {"train_attn": shape.attention, "train_mlp": shape.mlp}
            self.store.note_run(model_id, about)
            return {"type": kind, "model_id": model_id}

        self._start(run, 0, kind, digest(body), body, act)
        return self._promise(f"{model_id}:0", model_id)

    def _start(
        self,
        run: Run,
        seq_id: int,
        kind: str,
        key: bytes,
        body: bytes,
        act: Callable[[], Result],
        then: Callable[[Result], None] | None = None,
    ) -> None:
        request_id = f"{run.model_id}:{seq_id}"
        self.journal.take(Request(request_id, run.model_id, seq_id, kind, key, body, None, None), run.session_id)
        done = _Done()
        work = self._in_turn(run, seq_id, kind, act, then, done)
        self.futures.start(request_id, run.session_id, key, work, self._record(run, seq_id, done))

    async def _in_turn(
        self,
        run: Run,
        seq_id: int,
        kind: str,
        act: Callable[[], Result],
        then: Callable[[Result], None] | None,
        done: _Done,
    ) -> Result:
        """Does something on the engine's thread when the model's earlier requests are done, and `then` something here."""
        try:
            await run.order.turn(seq_id)
            if run.restoring is not None:
                await asyncio.shield(run.restoring)
            result = await self.engine.between_steps(lambda: self._kept(run, kind, act, done))
            if then is not None:
                done.before = None if run.in_flight is None else run.in_flight.held
                then(result)
            return result
        finally:
            run.last_request = now()
            await run.order.done(seq_id)

    @staticmethod
    def timed(run: Run, kind: str, act: Callable[[], Result]) -> Result:
        """Does something, and counts the time for which the model was trained."""
        began = time.perf_counter()
        try:
            return act()
        finally:
            if kind in _CHANGES:
                run.since_s += time.perf_counter() - began

    def _kept(self, run: Run, kind: str, act: Callable[[], Result], done: _Done) -> Result:
        """Does something, and keeps the model if it is time."""
        # Of those that fail, a step alone may change something: one that diverges forgets the gradient.
        done.again = kind == "optim_step"
        result = self.timed(run, kind, act)
        done.again = kind in _CHANGES
        if kind == "create_model" or kind == "load_weights":
            done.kept = self._keep(run)
        elif kind == "optim_step" and run.since_s >= _TIMES * run.keeping_s:
            # The step is done; after a kill it runs again.
            with suppress(StorageError):
                done.kept = self._keep(run)
        return result

    def _keep(self, run: Run) -> Path:
        """Writes a model as it is now."""
        began = time.perf_counter()
        directory = self.journal.fresh_directory()
        with storage_errors(directory):
            run.model().save(directory)
            for file in (*directory.iterdir(), directory):
                sync(file)
        run.keeping_s, run.since_s = time.perf_counter() - began, 0.0
        return directory

    def _record(self, run: Run, seq_id: int, done: _Done) -> Record:
        async def record(content: bytes, media_type: str) -> None:
            again = done.again and done.kept is None
            self.journal.done(f"{run.model_id}:{seq_id}", content, media_type, again)
            before = None
            if done.kept is not None:
                before, run.kept = run.kept, done.kept
                self.journal.keep_model(run.model_id, run.session_id, done.kept.name, seq_id)
            await self.journal.flush()
            done.before = None
            _remove(before)

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
    ) -> Asked:
        """Begins a request of a model, or finds it if it came before. `key` is the digest of its body."""
        request_id = f"{run.model_id}:{seq_id}"
        if not self.futures.known(request_id, key):
            run.order.check(seq_id)
            self.heard(run.session_id)
            self._start(run, seq_id, kind, key, body, act, then)
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
        """Returns what a request of `_CHANGES`, or a pass without a gradient, does on the engine's thread."""
        if kind == "optim_step":
            return self._step(run, fields_of(body))
        if kind == "load_weights":
            return self._load(run, fields_of(body))
        return lambda: _passed(run, self._checked(parsed(body)))

    def begin_again(self, request: Request) -> None:
        """Begins a training request that was taken before this process. Raises TinkerError or UserError for one that cannot."""
        body = request.body or b""
        if request.kind in _PASSES:
            run = self.sessions.run(request.model_id)
            act = self.act_of(run, request.kind, body)
            self._ordered(run, request.seq_id, request.kind, request.digest, body, act)
        else:
            begins: Callable[[bytes, Fields], Asked] = getattr(self, request.kind)
            begins(body, fields_of(body))

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
                "eps": given.number("eps", 1e-12),
                "weight_decay": given.number("weight_decay", 0.0),
                "grad_clip_norm": given.number("grad_clip_norm", 0.0),
            }
            return run.model().step(params)

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

    def save_weights_for_sampler(self, body: bytes, fields: Fields) -> Asked:
        """Saves weights to sample from: under a name on disk, or for a sampling session in memory."""
        run, seq_id = self.sessions.run(fields.text("model_id")), fields.whole("seq_id")
        session = self.sessions.live(run.session_id)
        name = fields.text("path", None)
        number = fields.whole("sampling_session_seq_id", None)
        in_flight = fields.text("kind", "snapshot") == "inflight"
        held = list[Held]()

        def act() -> Asked:
            if name is not None or number is None:
                saved = self._save(
                    run, seq_id, "sampler_weights", name or f"{seq_id:08}", run.model().save_for_sampling, fields
                )
                return {"type": "save_weights_for_sampler", "path": saved.path}
            held.append(Held.written(run.model().values(), self.journal.directory))
            return {"type": "save_weights_for_sampler", "sampling_session_id": f"{session.session_id}:sample:{number}"}

        def then(reply: Result) -> None:
            if isinstance(reply, dict) and "sampling_session_id" in reply:
                sampler = run.sampler(in_flight)
                before, (sampler.held,) = sampler.held, held
                self._slots.moved(sampler)
                self._add_sampler(session, reply["sampling_session_id"], sampler, run.model_id if in_flight else None)
                if before is not None:
                    self.journal.move_samplers(before.file.name, sampler.held.file.name)

        return self._ordered(run, seq_id, "save_weights_for_sampler", digest(body), body, act, then)

    def _add_sampler(self, session: Session, sampler_id: str, sampler: Sampler, model_id: str | None = None) -> None:
        """Adds a sampler to a session; with a model one that its saves move."""
        self.sessions.add_sampler(session, sampler_id, sampler)
        shape, held = sampler.shape, sampler.held
        of = (None, None, None) if shape is None else (shape.rank, shape.attention, shape.mlp)
        file = None if held is None else held.file.name
        self.journal.add_sampler(sampler_id, session.session_id, model_id, *of, file, sampler.path)

    def load_weights(self, body: bytes, fields: Fields) -> Asked:
        """Loads saved weights into a model, or makes the model that they are of."""
        path, optimizer = fields.text("path"), fields.flag("optimizer")
        _check_optimizer(fields)
        if fields.has("model_id"):
            run = self.sessions.run(fields.text("model_id"))
            act = self._load(run, fields)
            return self._ordered(run, fields.whole("seq_id"), "load_weights", digest(body), body, act)
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

    def _load(self, run: Run, fields: Fields) -> Callable[[], Asked]:
        path, optimizer = fields.text("path"), fields.flag("optimizer")

        def act() -> Asked:
            directory = self.store.find(path, "weights").directory
            run.trained = TrainedModel(self.base, run.model().shape, directory, optimizer)
            return {"type": "load_weights", "path": path, "model_id": run.model_id}

        return act

    def unload_model(self, body: bytes, fields: Fields) -> Asked:
        """Frees a model once the requests that have come are done."""
        model_id = fields.text("model_id")
        request_id, key = f"{model_id}:unload", digest(body)
        if not self.futures.known(request_id, key):
            run = self.sessions.run(model_id)
            row = Request(request_id, model_id, UNLOAD, "unload_model", key, body, None, None)
            self.journal.take(row, run.session_id)

            async def record(content: bytes, media_type: str) -> None:
                self.journal.done(request_id, content, media_type, again=False)
                self.journal.drop_model(model_id)
                await self.journal.flush()
                _remove(run.kept)

            self.futures.start(request_id, run.session_id, key, self._unload(run), record)
        return self._promise(request_id, model_id)

    async def _unload(self, run: Run) -> Result:
        await run.order.idle()
        self.sessions.runs.pop(run.model_id, None)
        return {"type": "unload_model", "model_id": run.model_id}

    async def create_sampling_session(self, fields: Fields) -> Asked:
        session = self.sessions.live(fields.text("session_id"))
        sampler_id = f"{session.session_id}:sample:{fields.whole('sampling_session_seq_id')}"
        if sampler_id not in self.sessions.samplers:
            sampler = await self._sampler_of(fields)
            # The session may have ended meanwhile.
            self._add_sampler(self.sessions.live(session.session_id), sampler_id, sampler)
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
            sampler_id, sampler = f"alone-{digest(body).hex()[:24]}", await self._sampler_of(fields)
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


def _check_optimizer(fields: Fields) -> None:
    kind = fields.table("optimizer_config", None).text("type", "adamw")
    if kind != "adamw":
        raise TinkerError(f"optimizer_config.type = {kind!r}: this server has adamw alone")
