"""A fleet: one `Engine` over several engine servers.

A request goes to the server with the fewest tokens left to sample, later turns of a sample to the server that has its prefix. A
server that is lost, late or wrong is fenced: it gets no requests until it is healed, restarted if need be. A request on which a
server was lost is tried once more, with the same seed; on which a second one is lost, it is given up, because one token id outside
the vocabulary ends a whole vLLM server.

What heals a server depends on whose weights it has: the learner's (`nmoe.engine.remote.published`) or its own
(`nmoe.engine.remote.served`).
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from nmoe.engine.api import EngineStats, Request
from nmoe.engine.dealing import Dealing
from nmoe.engine.remote.connections import Connections
from nmoe.engine.remote.server import EngineServer, ServerLostError
from nmoe.engine.remote.silence import Silence
from nmoe.engine.remote.supervisor import Restarts
from nmoe.errors import InfrastructureError, UserError
from nmoe.model.config import ModelConfig
from nmoe.types import Sample, Sampling

R = TypeVar("R")
# Tokens of a prompt by which the server is chosen that has its prefix.
_PREFIX_TOKENS = 64
# Seconds that a coroutine has to close its tools and sandboxes.
_ENDING_S = 30.0
# Seconds that a request may take beyond the time for its tokens.
DEADLINE_S = 60.0
# Restarts of a server for one fault, and seconds: between two attempts to heal one that others start, and between two questions
# whether it answers.
_RESTARTS, _LONGEST_S, _ASKED_EVERY_S = 3, 30.0, 0.5
# Seconds that each token of a request for scores may take: it is one pass of the model.
_SCORED_S = 1.0


class Address(Protocol):
    """A server that can be reached. `start` starts it, or starts it again, and returns its URL; a server that this run did not
    start cannot be restarted."""

    name: str
    restarts: bool

    def start(self) -> str: ...

    def stop(self) -> None: ...


@dataclass
class Slot:
    """One server's place in the fleet. It is open where it may get requests; `fence` is the reason why it may not, and `fences`
    the number of times that it was fenced. `samples` counts what its requests ask for, and `limits` the requests by
    the tokens that each may sample. `healing` is the task that gives it weights, and opens it."""

    index: int
    address: Address
    server: EngineServer
    silence: Silence
    open: bool = False
    version: int = 0
    fence: str | None = None
    fences: int = 0
    samples: int = 0
    limits: Counter[int] = field(default_factory=Counter)
    healing: asyncio.Task[None] | None = None


class Fleet(ABC):
    """An `Engine` over servers.

    `run` runs a coroutine on an event loop that lives as long as the fleet, in a thread beside. The calling thread waits, and does
    meanwhile what needs it: gathers weights and computes the learner's log-probabilities, as every torch operation is its own.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        model: ModelConfig,
        *,
        token_s: float,
        key: str,
        note: Callable[[str], None],
        named: str = "engine.urls: ",
        speaks: type[EngineServer] = EngineServer,
        wait_s: float = 0.0,
        most: int | None = None,
    ) -> None:
        """`token_s` are the seconds that a token of a request may take, waiting included. `note` writes a line of the run's log.
        `named` begins messages about servers that cannot be used. `speaks` is the client of these servers. One that
        only others can start again is waited for `wait_s` seconds. A server has at most `most` samples at once, or one request."""
        self._model, self._token_s, self._note, self._named = model, token_s, note, named
        self._speaks = speaks
        self._wait_s = wait_s
        if not key.isascii():
            raise UserError("NMOE_ENGINE_KEY: a key is ASCII text, because it travels in a header of HTTP")
        self._addresses, self._most = addresses, most
        self._slots: list[Slot] = []
        self._dealing = Dealing(len(addresses))
        self._holds_prefix: dict[tuple[int, ...], int] = {}
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._client = Connections(key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nmoe-fleet", daemon=True)
        self._changed = asyncio.Condition()
        # The requests without a server, in the order in which they get one, and what has each look for it.
        self._waiting: list[tuple[int, int]] = []
        self._looks: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._ended = asyncio.Event()  # of a request
        self._publishing = False  # which ends heals, and opens servers or heals them anew
        self._preparing = False  # a publication, before anything of it is sent
        self._sampled_tokens = self._retried = self._lost = self._healed = 0
        self.on_fault: Callable[[int, str], None] | None = None
        """Called with the index of a server that is fenced, and the reason."""
        self._requests, self._idle_s, self._idle_since = 0, 0.0, time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            urls = [address.start() for address in self._addresses]
            self.run(self._open(urls))
        except BaseException:
            self.__exit__()
            raise
        return self

    async def _open(self, urls: Sequence[str]) -> None:
        until = self._loop.time() + self._wait_s
        for index, (address, url) in enumerate(zip(self._addresses, urls, strict=True)):
            server = self._speaks(address.name, url, self._client, self._model)
            slot = Slot(index, address, server, Silence(address.name, self._note))
            self._slots.append(slot)
            try:
                if self._wait_s and not address.restarts:
                    await self._answering(slot, until)
                await self._admit(slot)
            except InfrastructureError as error:
                if self._wait_s and not address.restarts:
                    # Others start it again, and the first publication reaches it or heals it.
                    slot.fence = str(error)
                    self._note(f"engine {address.name} is fenced: {error}")
                    continue
                raise UserError(f"{self._named}{error}; start the server, or name another") from None
        if all(slot.fence is not None for slot in self._slots):
            raise self._no_engine()

    @abstractmethod
    async def _admit(self, slot: Slot) -> None:
        """Reads what a new server serves. Raises InfrastructureError for one that cannot be used, UserError for another model."""

    @abstractmethod
    async def _restore(self, slot: Slot) -> None:
        """Opens a fenced server once it has the right weights. Raises InfrastructureError if it has not."""

    @abstractmethod
    async def _sample(self, slot: Slot, request: Request, attempt: int) -> list[Sample]:
        """Has a server sample a request. Raises ServerLostError where the server is at fault."""

    def __exit__(self, *_: object) -> None:
        for slot in self._slots:
            if slot.healing is not None:
                self._loop.call_soon_threadsafe(slot.healing.cancel)
        for address in self._addresses:
            address.stop()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine that uses this engine to its end, and returns its result. Raises its exceptions."""
        ended = threading.Event()

        async def watched() -> R:
            try:
                return await coroutine
            finally:
                ended.set()

        outcome = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        outcome.add_done_callback(lambda _: self._actions.put(None))
        try:
            while not outcome.done() or not self._actions.empty():
                if (action := self._actions.get()) is not None:
                    action()
            return outcome.result()
        except BaseException:
            if outcome.cancel():
                ended.wait(_ENDING_S)  # the coroutine closes its tools and sandboxes
            with suppress(queue.Empty):
                while True:
                    self._actions.get_nowait()
            raise

    async def _on_caller(self, function: Callable[[], R]) -> R:
        """Calls a function on the thread that is inside `run`, or the next one that will be."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()

        def settle(set_: Callable[..., None], value: Any) -> None:
            if not future.done():
                set_(value)

        def action() -> None:
            if future.done():  # its caller was cancelled
                return
            # An interrupt is not passed on, because it would end the event loop: `run` cancels the coroutine.
            try:
                result = function()
            except Exception as error:
                loop.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, future.set_result, result)

        self._actions.put(action)
        return await future

    async def generate(self, request: Request) -> list[Sample]:
        """Returns the request's samples in order of their index. Raises UserError if the request is invalid, and ServerLostError
        where two servers were lost on it."""
        self._check(request)

        async def sampled(slot: Slot, attempt: int, finished: Callable[[int], None]) -> list[Sample]:
            samples = await self._sample(slot, request, attempt)
            for sample in samples:
                sample.engine = slot.index if len(self._slots) > 1 else None
                finished(len(sample.token_ids))
            return samples

        samples = await self._tried(request, sampled)
        self._sampled_tokens += sum(len(sample.token_ids) for sample in samples)
        return samples

    async def _tried(
        self, request: Request, call: Callable[[Slot, int, Callable[[int], None]], Coroutine[Any, Any, R]]
    ) -> R:
        """Returns what a server answers to a request, or a second one where the first is lost on it. Raises ServerLostError where
        both are."""
        prefix = request.prompt_ids[:_PREFIX_TOKENS]
        for attempt in (1, 2):
            slot = await self._choose(request, self._holds_prefix.get(prefix))
            self._holds_prefix[prefix], fences = slot.index, slot.fences
            try:
                with self._dealing.dealt(slot.index, request) as finished, self._counted(slot, request):
                    return await call(slot, attempt, finished)
            except ServerLostError as error:
                self._retried += attempt == 1
                if slot.open and slot.fences == fences:
                    self._fence(slot, str(error))
                lost = error
        self._lost += 1
        raise lost

    @contextmanager
    def _counted(self, slot: Slot, request: Request) -> Iterator[None]:
        """Counts a request that a server has, and the time without any."""
        if not self._requests:
            self._idle_s = self.idle_s()
        self._requests += 1
        slot.samples += request.samples
        slot.limits[request.sampling.max_new_tokens] += 1
        try:
            yield
        finally:
            self._requests -= 1
            slot.samples -= request.samples
            slot.limits[request.sampling.max_new_tokens] -= 1
            if not self._requests:
                self._idle_since = time.monotonic()
            self._ended.set()
            self._admit_next()

    def idle_s(self) -> float:
        """Returns the seconds in which no server had a request."""
        return self._idle_s + (0.0 if self._requests else time.monotonic() - self._idle_since)

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        for one in enumerate(await self.generate(request)):
            yield one

    def _check(self, request: Request) -> None:
        vocabulary, context = self._model.vocab_size, self._model.context_tokens
        if not request.prompt_ids or not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            raise UserError(f"request {request.request_id}: prompt ids must lie in 0..{vocabulary - 1}, the vocabulary")
        if len(request.prompt_ids) + request.sampling.max_new_tokens > context:
            raise UserError(f"request {request.request_id}: it exceeds the model's context of {context} tokens")

    async def _choose(self, request: Request, preferred: int | None) -> Slot:
        """Waits for a server with room for a request. The first in the order gets one first, though others may be smaller."""
        turn = (request.order, next(self._numbers))
        insort(self._waiting, turn)
        try:
            while True:
                open_ = [slot.index for slot in self._slots if self._may_get(slot, request)]
                if open_ and self._waiting[0] == turn:
                    return self._slots[self._dealing.choose(open_, request, preferred)]
                lost = all(slot.healing is None and slot.fence is not None for slot in self._slots)
                if lost and not self._publishing:
                    raise self._no_engine()
                self._looks[turn] = asyncio.get_running_loop().create_future()
                await self._looks[turn]
        finally:
            self._looks.pop(turn, None)
            del self._waiting[bisect_left(self._waiting, turn)]
            self._admit_next()  # it looks once this one is counted

    def _may_get(self, slot: Slot, request: Request) -> bool:
        room = self._most is None or not slot.samples or slot.samples + request.samples <= self._most
        return slot.open and room

    def _admit_next(self) -> None:
        """Has the first of the waiting requests look for a server."""
        if self._waiting and (look := self._looks.get(self._waiting[0])) is not None and not look.done():
            look.set_result(None)

    def _no_engine(self) -> InfrastructureError:
        reasons = "; ".join(f"{slot.server.name}: {slot.fence}" for slot in self._slots)
        return InfrastructureError(
            f"no engine is left to sample with: {reasons}. Start the servers again; the same command goes on, a run's with "
            "--run.resume=true"
        )

    def _fence(self, slot: Slot, reason: str) -> None:
        """Gives a server no more requests, and heals it beside. A publication that is being prepared reaches it by itself: a heal
        would send weights that are old by then, and compare its samples with a learner that has stepped."""
        slot.open, slot.fence, slot.fences = False, reason, slot.fences + 1
        if self.on_fault is not None:
            self.on_fault(slot.index, reason)
        self._note(f"engine {slot.server.name} is fenced: {reason}")
        if slot.healing is None and not self._preparing:
            slot.healing = asyncio.get_running_loop().create_task(self._heal(slot))

    async def _heal(self, slot: Slot) -> None:
        """Restores a fenced server. Where that does not help it is started again, or waited for while others may start it."""
        restarts, until, again = Restarts(_RESTARTS), self._loop.time() + self._wait_s, False
        try:
            await self._notify()  # whoever holds samples of it
            while True:
                try:
                    if again and slot.address.restarts:
                        await self._restart(slot)
                    elif again:
                        await self._answering(slot, until)
                    await self._restore(slot)
                except InfrastructureError as error:
                    slot.fence = str(error)
                else:
                    self._healed += 1
                    restarted = " after a restart" if again and slot.address.restarts else ""
                    self._note(f"engine {slot.server.name} serves again{restarted}")
                    return
                delay, again = restarts.delay(self._loop.time()), True
                if slot.address.restarts:
                    if delay is None:
                        break
                elif self._loop.time() >= until:
                    break
                await asyncio.sleep(_LONGEST_S if delay is None else delay)
            self._note(f"engine {slot.server.name} stays fenced: {slot.fence}")
        finally:
            slot.healing = None
            await self._notify()

    async def _notify(self) -> None:
        """Has all look again that wait for a server, or for one to be open or fenced."""
        for look in self._looks.values():
            if not look.done():
                look.set_result(None)
        async with self._changed:
            self._changed.notify_all()

    async def _answering(self, slot: Slot, until: float) -> None:
        """Returns once a server answers. Raises ServerLostError if it does not until this time of the loop."""
        while True:
            try:
                await slot.server.info()
                return
            except ServerLostError:
                if self._loop.time() >= until:
                    raise
                await asyncio.sleep(_ASKED_EVERY_S)

    async def _restart(self, slot: Slot) -> None:
        starting = asyncio.get_running_loop().run_in_executor(None, slot.address.start)
        try:
            url = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread starts it all the same, and the next publication reaches it.
            with suppress(InfrastructureError):
                slot.server = self._speaks(slot.server.name, await starting, self._client, self._model)
            raise
        slot.server = self._speaks(slot.server.name, url, self._client, self._model)

    async def _open_slot(self, slot: Slot) -> None:
        slot.open, slot.fence = True, None
        await self._notify()

    @abstractmethod
    async def update_weights(self, source: Any, version: int) -> None: ...

    def versions(self) -> list[int]:
        """Returns the version of each server's weights."""
        return [slot.version for slot in self._slots]

    def urls(self) -> list[str]:
        """Returns the servers' addresses."""
        return [slot.server.url for slot in self._slots]

    def metrics(self) -> dict[str, float]:
        """Returns the number of servers that serve and are fenced, and counts since the start."""
        serving = sum(slot.open for slot in self._slots)
        return {
            "engines_serving": float(serving),
            "engines_fenced": float(len(self._slots) - serving),
            "engines_healed": float(self._healed),
            "engine_requests_retried": float(self._retried),
            "engine_requests_lost": float(self._lost),
        }

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Returns the log-probability of every token but the first, given those before it. Raises UserError if no server can."""
        request = Request(tuple(token_ids), 1, Sampling(len(token_ids)), "score")

        silent_s = DEADLINE_S + _SCORED_S * len(token_ids)

        async def scored(slot: Slot, *_: Any) -> list[float]:
            asked = slot.server.score(token_ids, temperature, slot.version, None)
            return await slot.silence.broken_by(asked, silent_s)

        return await self._tried(request, scored)

    def forget_prefixes(self) -> None:
        self.run(self._forget_prefixes())

    async def _forget_prefixes(self) -> None:
        for slot in self._slots:
            if slot.open:
                try:
                    await slot.server.control("/reset_prefix_cache")
                except ServerLostError as error:
                    self._fence(slot, str(error))

    def sleep(self) -> None:  # noqa: B027 - it is all that there is to do
        """Does nothing: the servers' memory is not the learner's."""

    def stats(self) -> EngineStats:
        return EngineStats(self._sampled_tokens, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
