"""Samples requests as they were sampled by engine servers whose weights changed meanwhile: each version of the weights samples as
many tokens of a sequence as it did then, and the sequence is held until the next one has come.

A server computes the keys of running sequences again when it takes new weights (`LLMEngine.commit` with `recompute`), along the
routes by which their tokens were sampled. So in exact numerics the tokens of a sequence depend on its seed, on the versions and on
where they changed, and not on time, on the server, or on the other sequences.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.engine.native.sequence import Sequence as Sampled
from nmoe.engine.native.sequence import SequenceGroup
from nmoe.errors import UserError
from nmoe.model.transformer import Transformer
from nmoe.types import FinishReason, Sample

R = TypeVar("R")
Spans = Sequence[tuple[int, int]]
"""How many tokens each version of the weights samples, in their order."""


class OtherTokensError(UserError):
    """A sequence ended before or after the recorded one. The input is valid, so that the exit code is 1."""

    exit_code = 1


class HeldGroup(SequenceGroup):
    """One sample of a request, to be sampled by recorded versions of the weights."""

    def __init__(self, request: Request, index: int, spans: Spans) -> None:
        super().__init__(replace(request, request_id=f"{request.request_id}#{index}"), order=0)
        self.index, self.spans = index, spans
        self.of = request.request_id, index
        # Draws depend on the index.
        self.sequences = [self.sequences[index]]
        self.to_start = [*self.sequences]
        self.version = 0

    @property
    def finished(self) -> bool:
        return self.samples[self.index] is not None

    @property
    def due(self) -> int:
        """The number of tokens that this version of the weights and earlier ones sample."""
        return sum(count for version, count in self.spans if version <= self.version)

    @property
    def ends(self) -> bool:
        """Whether the sequence ends by this version of the weights."""
        return self.spans[-1][0] <= self.version

    @property
    def limit(self) -> int:
        return super().limit if self.ends else self.due


class HoldingEngine(LLMEngine):
    """An `LLMEngine` that holds sequences at their recorded numbers of tokens. `reached` counts the tokens of these, by request and
    index."""

    def __init__(
        self, model: Transformer, max_sequences: int, cache_bytes: int = 0, beside_tokens: int | None = None
    ) -> None:
        super().__init__(model, max_sequences, cache_bytes, beside_tokens=beside_tokens)
        self.reached: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._later: list[HeldGroup] = []  # whose first tokens are by later versions

    def add_held(self, request: Request, index: int, spans: Spans) -> HeldGroup:
        """Queues one sample of a request. Raises UserError for a request as `add` does, and OtherTokensError if its first tokens
        are by weights that the engine no longer has."""
        self.check(request)
        if spans[0][0] < self.runner.version:
            raise OtherTokensError(
                f"request {request.request_id}: its first tokens were sampled by version {spans[0][0]} of the weights, and asked "
                f"for at {self.runner.version}: the replay does not follow the record"
            )
        group = HeldGroup(request, index, spans)
        self._later.append(group)
        self._start_due()
        return group

    def _start_due(self) -> None:
        version, later = self.runner.version, self._later
        self._later = []
        for group in later:
            group.version = version
            if group.due:
                group.order = self.scheduler.arrived
                self._queue(group)
            else:
                self._later.append(group)

    def _finish(self, reasons: dict[Sampled, FinishReason]) -> list[SequenceGroup]:
        ended = dict(reasons)
        for sequence, reason in reasons.items():
            group = sequence.group
            if isinstance(group, HeldGroup) and reason == "length" and not group.ends:
                self.scheduler.hold(sequence)
                self.reached[group.of] = group.due
                del ended[sequence]
        finished = super()._finish(ended)
        for group in finished:
            if isinstance(group, HeldGroup):
                self.reached[group.of] = group.due
        return finished

    def commit(self, version: int, recompute: bool = False) -> None:
        """Takes new weights, with which the sequences go on that are held for them."""
        super().commit(version, recompute)
        for sequence in list(self.scheduler.held):
            group = sequence.group
            assert isinstance(group, HeldGroup), "no others are held"
            before, group.version = group.due, version
            if group.due > before:
                self.scheduler.release(sequence)
        self._start_due()


class HeldEngine(NativeEngine):
    """A native engine for a replay. `spans` returns the recorded spans of each sample by the request's id; None for a request
    that the present weights sample, such as an evaluation's.

    Its event loop lives as long as the block, so that groups are under way while the calling thread trains.
    """

    _sampler = HoldingEngine
    on_fault: Callable[[int, str], None] | None = None
    """Of servers alone."""
    discarded_tokens = reprefilled_tokens = 0
    """Tokens of servers that did not sample by the learner's weights: of none."""

    def __init__(
        self,
        model: Transformer,
        max_sequences: int,
        cache_mb: int,
        spans: Callable[[str], Mapping[int, Spans] | None],
    ) -> None:
        super().__init__(model, max_sequences, cache_mb)
        self._spans = spans
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nmoe-replay", daemon=True)

    def __enter__(self) -> HeldEngine:
        self._running = True
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._running = False

    @property
    def _holding(self) -> HoldingEngine:
        assert isinstance(self._engine, HoldingEngine), "made by `_sampler`"
        return self._engine

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine on the loop to its end, and returns its result; computes meanwhile. Other requests go on later."""
        self._stepping = threading.get_ident()
        outcome = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        outcome.add_done_callback(self._wake_up)
        try:
            while not outcome.done():
                self._turn(outcome)
        except BaseException as error:
            self._give_up(error)
            raise
        return outcome.result()

    def _wake_up(self, _: object) -> None:
        with self._wake:
            self._wake.notify()

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        if (spans := self._spans(request.request_id)) is None:
            async for one in super().samples(request):
                yield one
            return
        samples = await asyncio.gather(*(self._held(request, index, spans) for index in range(request.samples)))
        for one in enumerate(samples):
            yield one

    async def _held(self, request: Request, index: int, recorded: Mapping[int, Spans]) -> Sample:
        if (spans := recorded.get(index)) is None:
            raise OtherTokensError(
                f"request {request.request_id}: the record has no sample {index} of it: the replay does not follow the record"
            )
        if not spans:  # two servers were lost on it
            return Sample([], [], [], "abort")
        samples = await self._submit(lambda: self._holding.add_held(request, index, spans))
        sample: Sample = samples[index]
        versions = [version for version, count in spans for _ in range(count)]
        if sample.versions != versions:
            raise OtherTokensError(
                f"request {request.request_id}: sample {index} has {len(sample.versions)} tokens where {len(versions)} were "
                f"recorded: other tokens were sampled"
            )
        return sample

    def _commit(self, version: int, recompute: bool = True) -> None:
        super()._commit(version, recompute)

    def idle_s(self) -> float:
        """Returns the seconds in which it had no request, which no replay compares."""
        return 0.0

    async def missing(self, due: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """Returns, of the samples that are to have so many tokens, the ones that have fewer so far."""
        reached = self._holding.reached
        return await self.between_steps(lambda: {of: count for of, count in due.items() if reached[of] < count})
