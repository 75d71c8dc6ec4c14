"""A fleet of servers that the learner publishes its weights to, and whose samples are compared with the learner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from nmoe.config.tables.asynchrony import InFlight
from nmoe.engine.api import Request
from nmoe.engine.remote.difference import Differences
from nmoe.engine.remote.fleet import DEADLINE_S, Address, Fleet, Slot
from nmoe.engine.remote.server import EngineServer, ServerLostError
from nmoe.engine.remote.shared_memory import remove_left
from nmoe.engine.remote.weights import Backend, Format, Publisher, Source, Transport, Update, prepared, written
from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.types import Sample, Sampling


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


class PublishedFleet(Fleet):
    """Servers that sample by the learner's weights. A fenced one is sent the present weights whole, restarted if need be,
    and opened once it samples again what the learner computes."""

    def __init__(
        self,
        addresses: Sequence[Address],
        source: Source,
        model: ModelConfig,
        canary: Canary,
        *,
        transport: Transport = "disk",
        format: Format | None = None,
        backend: Backend = "gloo",
        workers: int = 1,
        shared: Path | None = None,
        precision: str = "",
        token_s: float,
        key: str,
        note: Callable[[str], None],
        speaks: type[EngineServer] = EngineServer,
        wait_s: float = 0.0,
        in_flight: InFlight = "recompute",
        most: int | None = None,
    ) -> None:
        """`format` None is the format of the servers at hand, each of which has so many `workers`. Files for them are written below
        `shared`; None is this machine's memory. The others are `Fleet`'s. `in_flight` says what a publication does to requests."""
        super().__init__(addresses, model, token_s=token_s, key=key, note=note, speaks=speaks, wait_s=wait_s, most=most)
        remove_left()
        self._in_flight = in_flight
        self._source, self._canary, self._precision = source, canary, precision
        self._transport, self._format, self._backend, self._workers = transport, format, backend, workers
        self._prepared: Callable[[Source, Format, int], Update]
        self._prepared = partial(prepared, transport=transport, shared=shared)
        if transport == "delta":
            self._prepared = Differences(partial(written, shared=shared)).prepared
        self._publisher: Publisher | None = None
        self._update: Update | None = None
        self._version = 0
        self._settling, self._settled = asyncio.Lock(), False
        self._compared: dict[int, tuple[float, float]] = {}  # the last canary's difference and coverage of each server
        self._published: dict[str, float] = {}
        self.discarded_tokens = 0
        """Tokens of servers that did not sample by the learner's weights."""
        self.reprefilled_tokens = 0
        """Tokens of prompts and samples whose keys were computed again, because weights came while they were sampled."""

    async def _admit(self, slot: Slot) -> None:
        info = await slot.server.info()
        self._refuse_other_model(slot, info or {})
        slot.version = int((info or {}).get("weight_version", 0))
        format: Format = "hf" if info is None else "nmoe"
        if format != (self._format or format):
            raise UserError(
                f"{slot.server.url} is {'not ' * (info is None)}nmoe's engine server; name servers of one kind, and that kind"
            )
        self._format = format

    def _refuse_other_model(self, slot: Slot, info: dict[str, Any]) -> None:
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

    def __exit__(self, *of: object) -> None:
        try:
            super().__exit__(*of)
        finally:
            if self._update is not None:
                self._update.discard()

    async def generate(self, request: Request) -> list[Sample]:
        """Returns the request's samples in order of their index, with the finish reason "abort" where two servers were lost."""
        try:
            return await super().generate(request)
        except ServerLostError:
            return [Sample([], [], [], "abort") for _ in range(request.samples)]

    async def _sample(self, slot: Slot, request: Request, attempt: int) -> list[Sample]:
        """Samples of weights that came meanwhile are held until the server's canary has passed by them."""
        deadline_s = DEADLINE_S + self._token_s * request.sampling.max_new_tokens
        version, fences = slot.version, slot.fences
        samples = await slot.server.generate(request, version, attempt, deadline_s, lambda: self._version)
        if self._in_flight == "recompute":
            self.reprefilled_tokens += sum(map(partial(_read_again, len(request.prompt_ids)), samples))
        newest = max((sample.versions[-1] for sample in samples if sample.versions), default=version)
        if newest > version:
            async with self._changed:
                await self._changed.wait_for(lambda: slot.version >= newest or slot.fences > fences)
            if slot.fences > fences:
                self.discarded_tokens += sum(len(sample.token_ids) for sample in samples)
                raise ServerLostError(
                    f"{slot.server.name} was fenced before its samples of version {newest} had passed"
                )
        return samples

    async def _restore(self, slot: Slot) -> None:
        await self._install(slot, await self._send([slot]))

    async def _send(self, slots: Sequence[Slot]) -> dict[EngineServer, ServerLostError]:
        assert self._update is not None, "weights are published before anything is sampled"
        if self._publisher is None:
            self._publisher = Publisher(
                self._source,
                self._format or "hf",
                self._backend,
                self._on_caller,
                workers=self._workers,
                keeps_cache=self._in_flight == "stale_kv",
            )
        of = {slot.server: slot for slot in slots}
        return await self._publisher.send(self._update, list(of), lambda server: self._hold(of[server]))

    async def _hold(self, slot: Slot) -> None:
        """Gives a server no new requests, and waits for those that it has if weights are published between requests."""
        slot.open = False
        while self._in_flight == "drain" and slot.samples and slot.fence is None:
            self._ended.clear()
            await self._ended.wait()

    async def _take(self, slot: Slot, sent: Awaitable[dict[EngineServer, ServerLostError]]) -> None:
        """Opens a server once the weights of a publication were sent to it, or fences it."""
        try:
            await self._install(slot, await sent)
        except ServerLostError as error:
            slot.healing = None
            self._fence(slot, str(error))
        else:
            slot.healing = None  # it may be lost again, and is healed then, while others still take the weights

    async def _install(self, slot: Slot, failed: Mapping[EngineServer, ServerLostError]) -> None:
        """Opens a server that was sent the present weights, if its samples agree with the learner. Raises ServerLostError if they
        do not, or if it did not take the weights."""
        if slot.server in failed:
            raise failed[slot.server]
        if self._settled:
            difference, coverage = await self._compare(slot)
        else:
            async with self._settling:  # one server at a time while the number of prompts is open
                difference, coverage = await self._compare(slot)
                while self._canary.more_prompts():
                    difference, coverage = await self._compare(slot)
                self._settled = True
        if not difference <= (bound := self._canary.bound()):
            raise ServerLostError(
                f"after version {self._version} its log-probabilities differ from the learner's by up to {difference:.2g}, where "
                f"{bound:.2g} is rounding: it does not have the learner's weights"
            )
        self._compared[slot.index], slot.version = (difference, coverage), self._version
        await self._open_slot(slot)

    async def _compare(self, slot: Slot) -> tuple[float, float]:
        canary, version, tokens = self._canary, self._version, self._canary.tokens
        requests = [
            Request(prompt, 1, Sampling(tokens, seed=version), f"canary/{version}/{number}/{time.monotonic_ns()}")
            for number, prompt in enumerate(canary.prompts)
        ]
        # A full server samples its other requests first.
        longest = max((limit for limit, count in slot.limits.items() if count), default=0)
        deadline_s = DEADLINE_S + self._token_s * (longest + tokens)
        replies = await asyncio.gather(*(slot.server.generate(one, version, 1, deadline_s) for one in requests))
        sampled = [(request.prompt_ids, samples[0]) for request, samples in zip(requests, replies, strict=True)]
        return await self._on_caller(lambda: canary.difference(sampled))

    async def update_weights(self, source: Any, version: int) -> None:
        """Publishes the learner's weights to every server, fenced ones included. Raises InfrastructureError if none takes them."""
        began = time.perf_counter()
        self._publishing = self._preparing = True
        try:
            # A heal that went on would compare the old weights with a learner that has stepped.
            healing = [slot.healing for slot in self._slots if slot.healing is not None]
            for task in healing:
                task.cancel()
            await asyncio.gather(*healing, return_exceptions=True)
            self._holds_prefix.clear()
            assert self._format is not None, "servers that were opened have one"
            format, learner = self._format, self._source
            update = await self._on_caller(lambda: self._prepared(learner, format, version))
            old, self._update, self._version = self._update, update, version
            written = time.perf_counter()
            await self._publish()
            if old is not None:
                old.discard()
        finally:
            self._publishing = self._preparing = False
            await self._notify()
        stalled_s = time.perf_counter() - written
        # A server that others start again may take minutes, in which the others serve.
        ours = [slot for slot in self._slots if slot.address.restarts or not self._wait_s]
        await asyncio.gather(*(slot.healing for slot in ours if slot.healing is not None))
        async with self._changed:
            await self._changed.wait_for(
                lambda: any(slot.open for slot in self._slots) or all(slot.healing is None for slot in self._slots)
            )
        if not any(slot.open for slot in self._slots):
            raise self._no_engine()
        self._published = {
            "time_publish_prepare_s": written - began,
            "time_publish_commit_s": stalled_s,
            "publish_bytes": float(update.moved),
        }
        if self._transport == "delta" and self._publisher is not None:
            self._published["publish_full"] = float(self._publisher.wholes)
        differences, coverages = zip(*(self._compared[slot.index] for slot in self._slots if slot.open), strict=True)
        self._published |= {"canary_abs_max": max(differences), "canary_coverage": min(coverages)}

    async def _publish(self) -> None:
        """Sends the weights to all servers, each by itself, so that none waits for another; a broadcast has them all at once."""
        if self._transport == "group":
            together = asyncio.ensure_future(self._send(self._slots))
            sent: list[Awaitable[dict[EngineServer, ServerLostError]]] = [together for _ in self._slots]
        else:
            sent = [self._send([slot]) for slot in self._slots]
        for slot, one in zip(self._slots, sent, strict=True):
            slot.healing = asyncio.create_task(self._take(slot, one))
        self._preparing = False
        taking = [slot.healing for slot in self._slots if slot.healing is not None]
        try:
            outcomes = await asyncio.gather(*taking, return_exceptions=True)
        finally:
            for slot in self._slots:
                if slot.healing in taking:
                    slot.healing = None
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def metrics(self) -> dict[str, float]:
        """Returns the last publication's figures beside the fleet's."""
        return {**self._published, **super().metrics()}


def _read_again(prompt_tokens: int, sample: Sample) -> int:
    """Returns the tokens that each version of the weights but the first had to read before it sampled on."""
    changes = (at for at, (one, other) in enumerate(pairwise(sample.versions), 1) if one != other)
    return sum(prompt_tokens + at for at in changes)
