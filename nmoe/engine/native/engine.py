"""The native engine: an asyncio interface to the synchronous engine, which runs on the training thread.

`run` uses the calling thread for the engine's steps, while a coroutine (rollouts, tools, grading) runs on an event loop in another
thread, so that neither waits for the other. All torch work stays on one thread, because OpenMP keeps a thread pool per calling
thread, and two pools compete for few cores: two-thread decoding of the speedrun's model ran at 22k tokens/s with a pool beside the
learner's, and at 58k with one pool.

Requests made in the same turn of the event loop reach the engine together and in order. The content of a batch then does not
depend on how fast a thread wakes, and a synchronous run repeats bit for bit.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from nmoe.engine.api import Delta, EngineStats, RawLogprob, Request
from nmoe.engine.native.adapters import AdapterEngines
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.engine.native.sequence import SequenceGroup
from nmoe.errors import DivergenceError, InfrastructureError, UserError
from nmoe.model.lora import Lora
from nmoe.model.transformer import Transformer
from nmoe.types import Sample

R = TypeVar("R")


class NativeEngine:
    """An engine in this process (an `Engine`) that runs the learner's own module. Up to `max_sequences` sequences decode at once,
    over a cache of `cache_mb` megabytes; 0 leaves its size to `LLMEngine`. Requests can name one of the `adapters`, which are
    detached from the model (`Lora.detach`): each has an equal part of the cache and takes its turn with the others, step by step.

        >>> import nmoe
        >>> from nmoe.engine.api import Request
        >>> from nmoe.types import Sampling
        >>> engine = nmoe.NativeEngine(nmoe.load_model(checkpoint), max_sequences=4)
        >>> request = Request((40, 41, 42), samples=2, sampling=Sampling(max_new_tokens=5), request_id="example")
        >>> [len(sample.token_ids) for sample in engine.run(engine.generate(request))]
        [5, 5]

    An engine that `survives` ends only the requests of a step in which the model computes NaN or infinity, with a DivergenceError;
    `diverged` has its message, by the adapter's name (None: the base), until a step of the same weights goes well.

    There is room for as many more adapters as `slots`, which come and go between two steps (`put_adapter`).

    With `beside_tokens` a step computes at most so many tokens of prompts beside running sequences, which wait for it. With
    `settles_s` an idle engine begins once no further request has come for so many seconds, or after ten times as long: clients
    send many at once, which a server reads one after another.

    Only the thread inside `run` touches the synchronous engine: calls from other threads put actions into its inbox, which it does
    between two steps.
    """

    _sampler: type[LLMEngine] = LLMEngine

    def __init__(
        self,
        model: Transformer,
        max_sequences: int,
        cache_mb: int = 0,
        adapters: Mapping[str, Lora] | None = None,
        survives: bool = False,
        beside_tokens: int | None = None,
        settles_s: float = 0.0,
        slots: int = 0,
    ) -> None:
        self.adapters = tuple(adapters or ())
        """The names of the adapters."""
        self.diverged: dict[str | None, str] = {}
        self._survives, self._settles_s = survives, settles_s
        self._engine: LLMEngine | AdapterEngines
        if adapters or slots:
            self._engine = AdapterEngines(model, max_sequences, cache_mb * 2**20, adapters or {}, beside_tokens, slots)
        else:
            self._engine = self._sampler(model, max_sequences, cache_mb * 2**20, beside_tokens=beside_tokens)
        self._wake = threading.Condition()  # guards what both threads touch: inbox, pending, error
        self._inbox: list[Callable[[], None]] = []
        self._pending: set[asyncio.Future[Any]] = set()
        self._error: BaseException | None = None
        self._outbox: list[Callable[[], None]] = []  # of the event loop's thread only
        self._futures: dict[SequenceGroup, asyncio.Future[Any]] = {}  # of the stepping thread only
        self._streamed: list[_Streamed] = []  # of the stepping thread only: not yet sent
        self._scorings, self._nobodys = 0, secrets.token_hex(8)
        self._running = self._paused = False
        self._mixed = False  # whether a copy of weights broke off, and none has succeeded since
        self._stepping = 0  # the thread inside `run`

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine that uses this engine to its end, and returns its result.

        Raises what the coroutine or the model raises, and RuntimeError if a coroutine is running already. Requests still running at
        the end are aborted.
        """
        if self._running:
            coroutine.close()
            raise RuntimeError("the engine is already running a coroutine; gather them into one")
        outcome: Future[R] = Future()
        cancel: Future[Callable[[], None]] = Future()
        # In the caller's context, which has the objects that its configuration names.
        live = partial(copy_context().run, self._live, coroutine, outcome, cancel)
        loop_thread = threading.Thread(target=live, name="nmoe-rollouts")
        self._running, self._paused, self._error = True, False, None
        self._stepping = threading.get_ident()
        try:
            loop_thread.start()
        except Exception:
            self._running = False
            coroutine.close()
            raise
        except BaseException as error:
            # An interrupt while `start` waits for the thread, which by now may run the coroutine: it is ended there.
            interrupt: BaseException | None = error
        else:
            interrupt = None
        try:
            if interrupt is not None:
                raise interrupt
            while not outcome.done():
                self._turn(outcome)
            return outcome.result()
        except BaseException as error:
            # Waiting futures have to fail too, or the event loop would wait for an answer that never comes.
            self._give_up(error)
            # The loop sets one of the two, even if it cannot start.
            ends: list[Future[Any]] = [outcome, cancel]
            wait(ends, return_when=FIRST_COMPLETED)
            if cancel.done():
                cancel.result()()
            raise
        finally:
            loop_thread.join()
            self._inbox, self._outbox, self._streamed, self._running = [], [], [], False
            self._pending.clear()
            self._futures.clear()
            self._engine.abort_all()

    async def generate(self, request: Request) -> list[Sample]:
        """Returns the request's samples in order of their index. Raises UserError if the request is invalid, or can never fit the
        context or the cache. Cancelling the caller aborts the request."""
        samples = {index: sample async for index, sample in self.samples(request)}
        return [samples[index] for index in range(request.samples)]

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        """Yields each of the request's samples with its index, as it finishes. Raises UserError if the request is invalid, or can
        never fit the context or the cache. Cancelling the caller, or closing the iterator early, aborts the samples that still
        run."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Queue[tuple[int, Sample] | None] = asyncio.Queue()

        def on_sample(index: int, sample: Sample) -> None:
            _call_on(loop, finished.put_nowait, (index, sample))

        ended = self._submit(lambda: self._engine.add(request, on_sample=on_sample))
        ended.add_done_callback(lambda _: finished.put_nowait(None))
        try:
            while (one := await finished.get()) is not None:
                yield one
            await ended  # raises what ended the request early
        finally:
            if not ended.done():
                self.abort(request.request_id)

    async def score(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Returns the log-probability of every token but the first, given those before it, `len(token_ids) - 1` numbers. Raises
        UserError for fewer than two tokens, for temperature 0, and if the tokens can never fit the context or the cache."""
        scores: list[float] = await self._scored(
            lambda request_id: self._engine.add_scoring(token_ids, temperature, request_id, adapter)
        )
        return scores

    async def likelihoods(
        self, token_ids: Sequence[int], top: int = 0, start: int = 0, adapter: str | None = None
    ) -> list[RawLogprob | None]:
        """Returns the raw log-probability of each token from position `start` on, given those before it, with the `top` likeliest
        tokens there: the softmax of the model's own logits, at temperature 1. The first token of all has none: None. Raises
        UserError if there are no tokens, or they can never fit the context or the cache."""
        scores: list[RawLogprob | None] = await self._scored(
            lambda request_id: self._engine.add_likelihoods(token_ids, top, start, request_id, adapter)
        )
        return scores if start > 0 else [None, *scores]

    async def _scored(self, add: Callable[[str], SequenceGroup]) -> Any:
        self._scorings += 1
        # A server's clients may name requests, to sample and to end them; none can guess this one.
        request_id = f"score/{self._nobodys}/{self._scorings}"
        try:
            scores = await self._submit(lambda: add(request_id))
        except asyncio.CancelledError:
            self.abort(request_id)
            raise
        if scores is None:
            raise InfrastructureError("the scoring was ended before it was done")
        return scores

    def follow(self, request: Request, put: Callable[[list[Delta]], None]) -> asyncio.Future[Any]:
        """Calls `put`, which may not raise, on the event loop's thread with the tokens of all samples of a request: once a step, in
        the order in which they were sampled. Each sample's last delta has its finish reason and the whole sample. Returns a future
        that ends with the request, and raises what ended it early, a UserError as `generate`. Who needs no more of a request that
        still runs has to abort it."""
        loop = asyncio.get_running_loop()

        def on_deltas(deltas: list[Delta]) -> None:
            self._streamed.append((loop, put, deltas))

        return self._submit(lambda: self._engine.add(request, on_deltas))

    async def stream(self, request: Request) -> AsyncGenerator[list[Delta], None]:
        """Yields the tokens of all samples of a request as `follow` has them, each time all that are there. Raises UserError as
        `generate` does. Cancelling the caller, or closing the generator early, aborts the samples that still run."""
        stream = _Stream(asyncio.get_running_loop())
        ended = self.follow(request, stream.put)
        ended.add_done_callback(lambda _: stream.end())
        try:
            while deltas := await stream.take():
                yield deltas
        finally:
            if not ended.done():
                self.abort(request.request_id)
            await ended  # raises what ended the request early

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, if it still runs, or only its sample of this index. Its callers get the tokens sampled so far, with the
        finish reason "abort"."""

        def end() -> None:
            self._finish(self._engine.abort(request_id, index))

        # Requests from earlier in this turn of the event loop go first.
        self._flush(end)

    async def update_weights(self, source: Transformer | Lora, version: int) -> None:
        """Takes a new version of the weights. The engine runs the learner's own module, adapter included, so that nothing is
        copied; tokens sampled from now on carry the version. Raises ValueError for another module."""
        model = source.model if isinstance(source, Lora) else source
        if model is not self._engine.model:
            raise ValueError("the native engine runs the learner's own module; it takes weights from no other")
        await self.between_steps(lambda: self._commit(version))

    async def replace_weights(self, put: Callable[[], None], version: int, recompute: bool = True) -> None:
        """Has `put` copy new weights into the module between two steps. Running sequences compute their keys again by them before
        they sample on; without `recompute` they keep those that they have. One request at least goes on before weights are replaced
        once more: else versions that come fast would let none go on. Where `put` raises, every request ends with the tokens that it
        has, since the module may hold a mixture, and later ones are refused until other weights have come."""

        def act() -> None:
            try:
                put()
            except BaseException:
                self._mixed = True
                for request_id in self._engine.request_ids:
                    self._finish(self._engine.abort(request_id))
                raise
            self._commit(version, recompute)

        while await self.between_steps(lambda: self._has_work and self._engine.recomputing):
            pass
        await self.between_steps(act)

    def _commit(self, version: int, recompute: bool = False) -> None:
        self._engine.commit(version, recompute)
        self._mixed = False

    async def between_steps(self, action: Callable[[], R]) -> R:
        """Calls a function on the engine's thread between two steps, and passes on its result or exception. The
        requests made earlier in this turn of the event loop are with the engine then. The function may change the weights of the
        engine's module, if `update_weights` comes before the next step."""
        done: asyncio.Future[R] = self._waiter()

        def act() -> None:
            try:
                result = action()
            except Exception as error:
                self._settle(done, _fail, error)
            else:
                self._settle(done, resolve, result)

        self._flush(act)
        return await done

    def put_adapter(self, name: str, adapter: Lora | Transformer) -> None:
        """Adds a detached adapter, or a whole model of the base's shape with other weights, or replaces the idle one of this name.
        Inside `between_steps` alone, where there are slots."""
        self._check_between("an adapter is put in")
        assert isinstance(self._engine, AdapterEngines), "there are slots for adapters"
        self._engine.put(name, adapter)

    def adapter_changed(self, name: str, version: int) -> None:
        """Notes that the values of an adapter have changed: its prompts are computed again, and its running sequences go on with
        the keys that they have. Inside `between_steps` alone, where the values change."""
        self._check_between("an adapter changes")
        assert isinstance(self._engine, AdapterEngines), "there are slots for adapters"
        self._engine.changed(name, version)

    async def pause(self) -> None:
        """Returns once no step runs, and none will until `resume`. Requests wait, running ones where they are."""
        await self.between_steps(lambda: self._hold(True))

    async def resume(self) -> None:
        """Lets a paused engine step again."""
        await self.between_steps(lambda: self._hold(False))

    def _hold(self, paused: bool) -> None:
        self._paused = paused

    def forget_prefixes(self) -> None:
        """Forgets cached prefixes. With fast numerics a cached prefix can give other bits than one that is computed, so that a run
        which has to repeat starts without any. Raises RuntimeError while `run` runs, except inside `between_steps`."""
        self._check_between("its prefixes are forgotten")
        self._engine.forget_prefixes()

    def sleep(self) -> None:
        """Frees the packed forms of the weights, which the next forward pass makes again: the learner needs their memory, and its
        update makes them outdated. Raises RuntimeError while `run` runs, except inside `between_steps`."""
        self._check_between("it sleeps")
        self._engine.free_packed()

    def _check_between(self, what: str) -> None:
        if self._running and threading.get_ident() != self._stepping:
            raise RuntimeError(f"the engine is running a coroutine; {what} before or after, or inside `between_steps`")

    def metrics(self) -> dict[str, float]:
        return {}

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def _live(self, coroutine: Coroutine[Any, Any, R], outcome: Future[R], cancel: Future[Callable[[], None]]) -> None:
        """Runs the coroutine on an event loop in the present thread. `outcome` receives its result or error, `cancel` a function
        that cancels the coroutine from another thread."""

        # Not the task's own result: asyncio ends the loop at an interrupt or exit in any task, and prints an error that `main`
        # raises later.
        ended: Future[R] = Future()

        async def main() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None, "a coroutine that runs has a task"

            def cancel_from_outside() -> None:
                _call_on(loop, task.cancel)

            cancel.set_result(cancel_from_outside)
            try:
                ended.set_result(await coroutine)
            except BaseException as error:
                ended.set_exception(error)

        try:
            asyncio.run(main())
            outcome.set_result(ended.result())
        except BaseException as error:  # raised again by `run`
            outcome.set_exception(error)
        with self._wake:
            self._wake.notify()

    def _turn(self, outcome: Future[R]) -> None:
        """Waits for something to do, runs the actions of the inbox, and takes one step."""
        with self._wake:
            waits = not self._has_work
            self._wake.wait_for(lambda: self._inbox or outcome.done() or self._has_work)
            if waits and self._settles_s:
                until = time.monotonic() + 10 * self._settles_s
                while self._wake.wait(self._settles_s) and time.monotonic() < until:
                    pass
            actions, self._inbox = self._inbox, []
        for action in actions:
            action()
        if self._has_work:
            self._step()

    def _step(self) -> None:
        try:
            finished = self._engine.step()
        except DivergenceError as error:
            if not self._survives:
                raise
            self.diverged[self._engine.adapter] = str(error)
            self._finish(())
            for group in [group for group in self._futures if group.aborted]:
                self._settle(self._futures.pop(group), _fail, error)
        else:
            self.diverged.pop(self._engine.adapter, None)
            self._finish(finished)

    @property
    def _has_work(self) -> bool:
        return not (self._paused or self._engine.idle)

    def _submit(self, add: Callable[[], SequenceGroup]) -> asyncio.Future[Any]:
        future = self._waiter()
        if not self._outbox:
            future.get_loop().call_soon(self._flush)
        self._outbox.append(partial(self._add, add, future))
        return future

    def _waiter(self) -> asyncio.Future[Any]:
        """Returns a future that fails if the engine fails. Raises RuntimeError if the engine has failed already, or outside of
        `run`, where nothing would ever answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._running:
            raise RuntimeError(
                "nothing is computed outside engine.run(...): run the coroutine that awaits this with it"
            )
        with self._wake:
            if self._error is not None:
                raise RuntimeError("the engine stopped after an error") from self._error
            self._pending.add(future)
        return future

    def _flush(self, *actions: Callable[[], None]) -> None:
        """Sends the actions that were collected in this turn of the event loop to the inbox, then `actions`."""
        outbox, self._outbox = self._outbox, []
        with self._wake:
            self._inbox += [*outbox, *actions]
            self._wake.notify()

    def _add(self, add: Callable[[], SequenceGroup], future: asyncio.Future[Any]) -> None:
        try:
            if self._mixed:  # also for requests that were on their way when the copy broke off
                raise InfrastructureError("the weights cannot be used: the copy of new ones broke off; send whole ones")
            group = add()
        except UserError as error:
            self._settle(future, _fail, error)
        else:
            self._futures[group] = future

    def _finish(self, groups: Iterable[SequenceGroup]) -> None:
        """Sends new tokens to their streams, with one call for all of them, because each call wakes the event loop's thread; then
        resolves the futures of requests that have ended."""
        streamed, self._streamed = self._streamed, []
        if streamed:
            _call_on(streamed[0][0], _put_all, streamed)
        for group in groups:
            self._settle(self._futures.pop(group), resolve, group.scores if group.scoring else group.samples)

    def _settle(self, future: asyncio.Future[R], settle: Callable[[asyncio.Future[R], Any], None], with_: Any) -> None:
        with self._wake:
            self._pending.discard(future)
        _call_on(future.get_loop(), settle, future, with_)

    def _give_up(self, error: BaseException) -> None:
        with self._wake:
            self._error = error
            pending = list(self._pending)
        for future in pending:
            # Ctrl-C reaches waiting tasks as a cancellation: raised in thousands of tasks, each would print its own traceback.
            _call_on(future.get_loop(), *((_fail, future, error) if isinstance(error, Exception) else (future.cancel,)))


class _Stream:
    """Collects tokens until they are taken. Used on the thread of its event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._deltas: list[Delta] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, deltas: list[Delta]) -> None:
        self._deltas += deltas
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Delta]:
        """Returns the tokens that are there, after waiting for some; none at the end."""
        if not (self._deltas or self._ended):
            self._waiter = self._loop.create_future()
            await self._waiter
        taken, self._deltas = self._deltas, []
        return taken


_Streamed = tuple[asyncio.AbstractEventLoop, Callable[[list[Delta]], None], list[Delta]]


def _put_all(streamed: list[_Streamed]) -> None:
    for _, put, deltas in streamed:
        put(deltas)


def _call_on(loop: asyncio.AbstractEventLoop, act: Callable[..., object], *args: object) -> None:
    """Calls a function on the loop's thread."""
    with suppress(RuntimeError):  # the loop has closed, so that nothing waits for it
        loop.call_soon_threadsafe(act, *args)


def resolve(future: asyncio.Future[R], result: R) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        # Counts as seen: a caller that is cancelled before it wakes never looks, and asyncio would print the error, which `run` or
        # another caller raises, whenever garbage is collected.
        future.exception()
