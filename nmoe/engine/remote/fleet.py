"""A fleet: one `Engine` over several engine servers.

A request goes to the server with the fewest tokens left to sample, later turns of a sample to the server that has its prefix. A
server that is lost, late or wrong is fenced: it gets no requests until it has taken the present weights whole, restarted if need
be, and has sampled again what the learner computes. A request on which a server was lost is tried once more, with the same seed; on
which a second one is lost, its samples are failures of the engine, and not trained on, because one token id outside the vocabulary
ends a whole vLLM server.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nmoe.engine.api import EngineStats, Request
from nmoe.engine.dealing import Dealing
from nmoe.engine.remote.server import PROBED, EngineServer, Probe, Served, ServerLostError
from nmoe.engine.remote.weights import Backend, Format, Publisher, Source, Transport, Update, prepared
from nmoe.errors import InfrastructureError, UserError
from nmoe.model.config import ModelConfig
from nmoe.types import Sample, Sampling

if TYPE_CHECKING:
    import httpx2

R = TypeVar("R")
# Tokens of a prompt by which the server is chosen that has its prefix.
_PREFIX_TOKENS = 64
# Seconds that a coroutine has to close its tools and sandboxes.
_ENDING_S = 30.0
# Seconds that a request may take beyond the time for its tokens.
_DEADLINE_S = 60.0
# Seconds that each token of a request for scores may take: it is one pass of the model.
_SCORED_S = 1.0
# Seconds after which a silent server is noted.
_SILENT_S = 600.0


class Address(Protocol):
    """A server that can be reached. `start` starts it, or starts it again, and returns its URL; a server that this run did not
    start cannot be restarted."""

    name: str
    restarts: bool

    def start(self) -> str: ...

    def stop(self) -> None: ...


class Canary(Protocol):
    """The comparison of a server's samples with the learner's log-probabilities, after each publication of weights.

    `prompts` are sampled, `tokens` each. `difference` returns the largest difference of a log-probability and the share of experts
    that the compared tokens reached; it is called on the thread that trains. `bound` is the largest difference that is rounding.
    `more_prompts` adds prompts where the last comparison reached too few experts.
    """

    prompts: list[tuple[int, ...]]
    tokens: int

    def difference(self, sampled: Sequence[tuple[tuple[int, ...], Sample]]) -> tuple[float, float]: ...

    def bound(self) -> float: ...

    def more_prompts(self) -> bool: ...


@dataclass
class _Slot:
    """One server's place in the fleet. It is open where it may get requests; `fence` is the reason why it may not."""

    index: int
    address: Address
    server: EngineServer
    open: bool = False
    version: int = 0
    served: Served | None = None  # of servers that keep their weights
    probe: Probe | None = None
    answered: float = 0.0  # when it last did
    noted: float = -math.inf  # when its silence was
    compared: tuple[float, float] = (0.0, 0.0)  # the last canary's difference and coverage
    fence: str | None = None
    healing: asyncio.Task[None] | None = None


class Fleet:
    """An `Engine` over servers.

    `run` runs a coroutine on an event loop that lives as long as the fleet, in a thread beside. The calling thread waits, and does
    meanwhile what needs it: gathers weights and computes the learner's log-probabilities, as every torch operation is its own.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        source: Source | None,
        model: ModelConfig,
        canary: Canary | None,
        *,
        transport: Transport = "disk",
        format: Format | None = None,
        backend: Backend = "gloo",
        workers: int = 1,
        precision: str = "",
        token_s: float,
        key: str,
        named: str = "engine.urls: ",
        note: Callable[[str], None],
    ) -> None:
        """Without a source and a canary the servers keep the weights that they have, which have to be the same on all of them.
        `format` None is the format of the servers at hand, each of which has so many `workers`. `token_s` are the seconds that a
        token of a request may take, waiting included. `named` begins messages about servers that cannot be used. `note` writes a
        line of the run's log."""
        self._source, self._model, self._canary = source, model, canary
        self._transport, self._format, self._backend, self._workers = transport, format, backend, workers
        self._precision, self._token_s, self._key, self._note = precision, token_s, key, note
        self._named = named
        if not key.isascii():
            raise UserError("NMOE_ENGINE_KEY: a key is ASCII text, because it travels in a header of HTTP")
        self._addresses = addresses
        self._slots: list[_Slot] = []
        self._dealing = Dealing(len(addresses))
        self._holds_prefix: dict[tuple[int, ...], int] = {}
        self._update: Update | None = None
        self._version = 0
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nmoe-fleet", daemon=True)
        self._changed, self._settling, self._settled = asyncio.Condition(), asyncio.Lock(), False
        self._sampled_tokens = self._retried = self._lost = self._healed = 0
        self._published: dict[str, float] = {}

    def __enter__(self) -> Fleet:
        import httpx2

        self._thread.start()
        try:
            urls = [address.start() for address in self._addresses]
            self.run(self._open(urls, httpx2))
        except BaseException:
            self.__exit__()
            raise
        return self

    async def _open(self, urls: Sequence[str], httpx: Any) -> None:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A server on this machine is not behind the proxy that the environment names.
        client: httpx2.AsyncClient = httpx.AsyncClient(
            headers=headers, timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False
        )
        self._client = client
        for index, (address, url) in enumerate(zip(self._addresses, urls, strict=True)):
            slot = _Slot(index, address, EngineServer(address.name, url, client, self._model))
            self._slots.append(slot)
            try:
                if self._source is None:
                    await self._adopt(slot)
                    continue
                info = await slot.server.info()
            except InfrastructureError as error:
                raise UserError(f"{self._named}{error}; start the server, or name another") from None
            self._refuse_other_model(slot, info or {})
            slot.version = int((info or {}).get("weight_version", 0))
            format: Format = "hf" if info is None else "nmoe"
            if format != (self._format or format):
                raise UserError(
                    f"{url} is {'not ' * (info is None)}nmoe's engine server; name servers of one kind, and that kind"
                )
            self._format = format
        if self._source is not None:
            self._publisher = Publisher(
                self._source, self._format or "hf", self._backend, self._on_caller, workers=self._workers
            )

    async def _adopt(self, slot: _Slot) -> None:
        """Opens a server with the weights that it has. Raises WireError and ServerLostError for one that cannot be used."""
        served, probe = await slot.server.served(_DEADLINE_S + self._token_s * PROBED)
        if served.vocab_size not in (None, self._model.vocab_size):
            raise ServerLostError(
                f"{slot.server.name} has another model: its vocabulary has {served.vocab_size:,} tokens, and the checkpoint's "
                f"{self._model.vocab_size:,}"
            )
        if served != (first := self._slots[0].served or served):
            raise ServerLostError(
                f"{slot.server.name} serves {served}; {self._slots[0].server.name} began with {first}: these are not the same"
            )
        if probe.is_of_other_weights(self._slots[0].probe or probe):
            raise ServerLostError(
                f"{slot.server.name} has other weights than those with which {self._slots[0].server.name} began, under the same "
                "name and version: one token gives other samples or log-probabilities"
            )
        # A healed server may round differently; results that carry the first digest in their name go on under it.
        slot.served, slot.probe, slot.version = slot.served or served, slot.probe or probe, served.version
        await self._open_slot(slot)

    def _refuse_other_model(self, slot: _Slot, info: dict[str, Any]) -> None:
        expected = {
            "vocab_size": self._model.vocab_size,
            "context_tokens": self._model.context_tokens,
            "precision": self._precision,
        }
        for name, wanted in expected.items():
            if (found := info.get(name, wanted)) != wanted:
                raise UserError(
                    f"{slot.server.name} ({slot.server.url}) has another model: its {name} is {found}, and {wanted} is wanted; "
                    "start it with the run's model.path and --precision"
                )

    def __exit__(self, *_: object) -> None:
        for slot in self._slots:
            if slot.healing is not None:
                self._loop.call_soon_threadsafe(slot.healing.cancel)
        try:
            for address in self._addresses:
                address.stop()
            if self._thread.is_alive():
                if hasattr(self, "_client"):
                    asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(10)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._loop.close()
        finally:
            if self._update is not None:
                self._update.discard()

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
        """Returns the request's samples in order of their index, with the finish reason "abort" where two servers were lost."""
        self._check(request)
        deadline_s = _DEADLINE_S + self._token_s * request.sampling.max_new_tokens

        async def sampled(slot: _Slot, attempt: int, finished: Callable[[int], None]) -> list[Sample]:
            if self._source is None:
                asked = slot.server.generate(request, slot.version, attempt, None)
                samples = await self._unless_silent(slot, deadline_s, asked)
            else:
                samples = await slot.server.generate(request, slot.version, attempt, deadline_s)
            if self._source is None and any(sample.finish_reason == "abort" for sample in samples):
                raise ServerLostError(f"{slot.server.name} was made to abort request {request.request_id!r}")
            for sample in samples:
                sample.engine = slot.index if len(self._slots) > 1 else None
                finished(len(sample.token_ids))
            return samples

        try:
            samples = await self._tried(request, sampled)
        except ServerLostError:
            if self._source is None:  # an evaluation would count them as wrong answers
                raise
            return [Sample([], [], [], "abort") for _ in range(request.samples)]
        self._sampled_tokens += sum(len(sample.token_ids) for sample in samples)
        return samples

    async def _tried(
        self, request: Request, call: Callable[[_Slot, int, Callable[[int], None]], Coroutine[Any, Any, R]]
    ) -> R:
        """Returns what a server answers to a request, or a second one where the first is lost on it. Raises ServerLostError where
        both are."""
        prefix = request.prompt_ids[:_PREFIX_TOKENS]
        for attempt in (1, 2):
            slot = await self._choose(request, self._holds_prefix.get(prefix))
            self._holds_prefix[prefix] = slot.index
            try:
                with self._dealing.dealt(slot.index, request) as finished:
                    return await call(slot, attempt, finished)
            except ServerLostError as error:
                self._retried += attempt == 1
                if slot.open:
                    self._fence(slot, str(error))
                lost = error
        self._lost += 1
        raise lost

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        for one in enumerate(await self.generate(request)):
            yield one

    def _check(self, request: Request) -> None:
        vocabulary, context = self._model.vocab_size, self._model.context_tokens
        if not request.prompt_ids or not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            raise UserError(f"request {request.request_id}: prompt ids must lie in 0..{vocabulary - 1}, the vocabulary")
        if len(request.prompt_ids) + request.sampling.max_new_tokens > context:
            raise UserError(f"request {request.request_id}: it exceeds the model's context of {context} tokens")

    async def _choose(self, request: Request, preferred: int | None) -> _Slot:
        async with self._changed:
            while not (open_ := [slot.index for slot in self._slots if slot.open]):
                if all(slot.healing is None and slot.fence is not None for slot in self._slots):
                    raise self._no_engine()
                await self._changed.wait()
        return self._slots[self._dealing.choose(open_, request, preferred)]

    def _no_engine(self) -> InfrastructureError:
        reasons = "; ".join(f"{slot.server.name}: {slot.fence}" for slot in self._slots)
        return InfrastructureError(
            f"no engine is left to sample with: {reasons}. Start the servers again; the same command goes on, a run's with "
            "--run.resume=true"
        )

    def _fence(self, slot: _Slot, reason: str) -> None:
        """Gives a server no more requests, and heals it beside."""
        slot.open, slot.fence = False, reason
        self._note(f"engine {slot.server.name} is fenced: {reason}")
        slot.healing = asyncio.get_running_loop().create_task(self._heal(slot))

    async def _heal(self, slot: _Slot) -> None:
        """Sends a fenced server all weights once more; restarts it if that does not help."""
        try:
            for restart in (False, True)[: 1 + slot.address.restarts]:
                try:
                    if restart:
                        await self._restart(slot)
                    if self._source is None:
                        await self._adopt(slot)
                    else:
                        await self._install(slot, (await self._send([slot])).get(slot.server))
                except InfrastructureError as error:
                    slot.fence = str(error)
                else:
                    self._healed += 1
                    self._note(f"engine {slot.server.name} serves again{' after a restart' if restart else ''}")
                    return
            self._note(f"engine {slot.server.name} stays fenced: {slot.fence}")
        finally:
            slot.healing = None
            async with self._changed:
                self._changed.notify_all()

    async def _restart(self, slot: _Slot) -> None:
        starting = asyncio.get_running_loop().run_in_executor(None, slot.address.start)
        try:
            url = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread starts it all the same, and the next publication reaches it.
            with suppress(InfrastructureError):
                slot.server = EngineServer(slot.server.name, await starting, self._client, self._model)
            raise
        slot.server = EngineServer(slot.server.name, url, self._client, self._model)

    async def _send(self, slots: Sequence[_Slot]) -> dict[EngineServer, ServerLostError]:
        assert self._update is not None, "weights are published before anything is sampled"
        for slot in slots:
            slot.open = False
        return await self._publisher.send(self._update, [slot.server for slot in slots])

    async def _install(self, slot: _Slot, failed: ServerLostError | None) -> None:
        """Opens a server that was sent the present weights, if its samples agree with the learner. Raises ServerLostError if they
        do not, or if it did not take the weights."""
        if failed is not None:
            raise failed
        assert self._canary is not None, "every publication is compared"
        if self._settled:
            difference, coverage = await self._compare(slot.server)
        else:
            async with self._settling:  # one server at a time while the number of prompts is open
                difference, coverage = await self._compare(slot.server)
                while self._canary.more_prompts():
                    difference, coverage = await self._compare(slot.server)
                self._settled = True
        if not difference <= (bound := self._canary.bound()):
            raise ServerLostError(
                f"after version {self._version} its log-probabilities differ from the learner's by up to {difference:.2g}, where "
                f"{bound:.2g} is rounding: it does not have the learner's weights"
            )
        slot.compared, slot.version = (difference, coverage), self._version
        await self._open_slot(slot)

    async def _open_slot(self, slot: _Slot) -> None:
        async with self._changed:
            slot.open, slot.fence = True, None
            self._changed.notify_all()

    async def _compare(self, server: EngineServer) -> tuple[float, float]:
        canary = self._canary
        assert canary is not None, "every publication is compared"
        version, tokens = self._version, canary.tokens
        requests = [
            Request(prompt, 1, Sampling(tokens, seed=version), f"canary/{version}/{number}/{time.monotonic_ns()}")
            for number, prompt in enumerate(canary.prompts)
        ]
        deadline_s = _DEADLINE_S + self._token_s * tokens
        replies = await asyncio.gather(*(server.generate(one, version, 1, deadline_s) for one in requests))
        sampled = [(request.prompt_ids, samples[0]) for request, samples in zip(requests, replies, strict=True)]
        return await self._on_caller(lambda: canary.difference(sampled))

    async def update_weights(self, source: Any, version: int) -> None:
        """Publishes the learner's weights to every server, fenced ones included. Raises InfrastructureError if none takes them."""
        began = time.perf_counter()
        # A heal that went on would compare the old weights with a learner that has stepped.
        healing = [slot.healing for slot in self._slots if slot.healing is not None]
        for task in healing:
            task.cancel()
        await asyncio.gather(*healing, return_exceptions=True)
        self._holds_prefix.clear()
        assert self._format is not None, "servers that were opened have one"
        format, learner = self._format, self._source
        assert learner is not None, "there is something to publish"
        update = await self._on_caller(lambda: prepared(learner, self._transport, format, version))
        old, self._update, self._version = self._update, update, version
        written = time.perf_counter()
        failed = await self._send(self._slots)
        installed = (self._install(slot, failed.get(slot.server)) for slot in self._slots)
        outcomes = await asyncio.gather(*installed, return_exceptions=True)
        if old is not None:
            old.discard()
        for slot, outcome in zip(self._slots, outcomes, strict=True):
            if isinstance(outcome, ServerLostError):
                self._fence(slot, str(outcome))
            elif outcome is not None:
                raise outcome
        stalled_s = time.perf_counter() - written
        await asyncio.gather(*(slot.healing for slot in self._slots if slot.healing is not None))
        if not any(slot.open for slot in self._slots):
            raise self._no_engine()
        self._published = {
            "time_publish_prepare_s": written - began,
            "time_publish_commit_s": stalled_s,
            "publish_bytes": float(update.size),
        }
        differences, coverages = zip(*(slot.compared for slot in self._slots if slot.open), strict=True)
        self._published |= {"canary_abs_max": max(differences), "canary_coverage": min(coverages)}

    def versions(self) -> list[int]:
        """Returns the version of each server's weights."""
        return [slot.version for slot in self._slots]

    def urls(self) -> list[str]:
        """Returns the servers' addresses."""
        return [slot.server.url for slot in self._slots]

    def served(self) -> list[Served]:
        """Returns what each server has served since it was opened, where nothing is published."""
        return [slot.served for slot in self._slots if slot.served is not None]

    def metrics(self) -> dict[str, float]:
        """Returns the last publication's figures, the number of servers that serve and are fenced, and counts since the start."""
        serving = sum(slot.open for slot in self._slots)
        return {
            **self._published,
            "engines_serving": float(serving),
            "engines_fenced": float(len(self._slots) - serving),
            "engines_healed": float(self._healed),
            "engine_requests_retried": float(self._retried),
            "engine_requests_lost": float(self._lost),
        }

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Returns the log-probability of every token but the first, given those before it. Raises UserError if no server can."""
        request = Request(tuple(token_ids), 1, Sampling(len(token_ids)), "score")
        silent_s = _DEADLINE_S + _SCORED_S * len(token_ids)

        async def scored(slot: _Slot, *_: Any) -> list[float]:
            asked = slot.server.score(token_ids, temperature, slot.version, None)
            return await self._unless_silent(slot, silent_s, asked)

        return await self._tried(request, scored)

    async def _unless_silent(self, slot: _Slot, silent_s: float, asked: Coroutine[Any, Any, R]) -> R:
        """Returns a server's answer. Raises ServerLostError once the server has answered nothing at all for so many seconds: all
        requests are sent at once, and the last one waits for all others."""
        task, began = asyncio.ensure_future(asked), time.monotonic()
        try:
            while not task.done():
                now = time.monotonic()
                silence = now - max(began, slot.answered)
                if silence >= silent_s:
                    raise ServerLostError(f"{slot.server.name} has answered nothing for {silence:.0f} s")
                if silence >= _SILENT_S <= now - slot.noted:
                    slot.noted = now
                    self._note(
                        f"{slot.server.name} has answered nothing for {silence:.0f} s; it is lost after {silent_s:.0f} s"
                    )
                await asyncio.wait((task,), timeout=min(silent_s - silence, _SILENT_S))
            result = task.result()
            slot.answered = time.monotonic()
            return result
        finally:
            task.cancel()

    def forget_prefixes(self) -> None:
        self.run(self._forget_prefixes())

    async def _forget_prefixes(self) -> None:
        for slot in self._slots:
            if slot.open:
                try:
                    await slot.server.control("/reset_prefix_cache")
                except ServerLostError as error:
                    self._fence(slot, str(error))

    def sleep(self) -> None:
        """Does nothing: the servers' memory is not the learner's."""

    def stats(self) -> EngineStats:
        return EngineStats(self._sampled_tokens, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
