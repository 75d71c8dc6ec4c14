"""Several adapters over one base: a synchronous engine for the base and for each adapter, which take turns step by step.

Each has its own scheduler and its own part of the cache, so that a prefix, whose keys depend on the adapter, is never found by
another, and every request is computed as by a server that has its adapter alone. Weights are held once.

An adapter can also be a whole model of the same shape with other weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from nmoe.engine.api import Delta, EngineStats, Request
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.engine.native.scheduler import PREFILL_TOKENS
from nmoe.engine.native.sequence import SequenceGroup
from nmoe.errors import UserError
from nmoe.model.lora import Lora
from nmoe.model.transformer import Transformer
from nmoe.types import Sample


class AdapterEngines:
    """An `LLMEngine` for requests of several adapters, by name; requests of no adapter are the base's. The adapters are detached
    from the model, except while a step of theirs runs. Each decodes up to `max_sequences` sequences, and has an equal part of the
    cache; there are parts for `slots` more, which are put in later. Engines that have work take steps in turn, so that none
    starves."""

    def __init__(
        self,
        model: Transformer,
        max_sequences: int,
        cache_bytes: int,
        adapters: Mapping[str, Lora | Transformer],
        beside_tokens: int | None = None,
        slots: int = 0,
    ) -> None:
        self.model = model
        self._adapters = dict(adapters)
        self._engines: dict[str | None, LLMEngine] = {}
        self._sizes = max_sequences, cache_bytes
        # A step of one engine holds up the sequences of all, of which it does not know.
        self._prefill_tokens = beside_tokens or PREFILL_TOKENS
        self._shares = 1 + len(adapters) + slots
        self._turns = deque[str | None]()
        self.adapter: str | None = None
        """The adapter of the last step; None: the base."""
        for name in (None, *adapters):
            self._begin(name)

    def _begin(self, name: str | None) -> None:
        with self._attached(name) as model:
            packs = self._engines[None].runner.packs if self._engines and model is self.model else None
            self._engines[name] = LLMEngine(model, *self._sizes, self._prefill_tokens, name, self._shares, packs)
        self._turns.append(name)

    def put(self, name: str, adapter: Lora | Transformer) -> None:
        """Adds a detached adapter, or a whole model, in one of the `slots`. One of the same name is taken out first."""
        self.take_out(name)
        self._adapters[name] = adapter
        self._begin(name)

    def take_out(self, name: str) -> None:
        """Removes an adapter, if there is one of this name. It has to be idle."""
        if name in self._engines:
            assert self._engines[name].idle, "no request of an adapter that is taken out runs"
            del self._engines[name], self._adapters[name]
            self._turns.remove(name)

    def changed(self, name: str, version: int) -> None:
        """Notes that the values of one adapter have changed: tokens that it samples from now on carry `version`."""
        self._engines[name].commit(version)

    def _attached(self, name: str | None) -> AbstractContextManager[Transformer]:
        adapter = self.model if name is None else self._adapters[name]
        return nullcontext(adapter) if isinstance(adapter, Transformer) else adapter.attached()

    def _of(self, adapter: str | None, request_id: str) -> LLMEngine:
        """Returns the engine of an adapter. Raises UserError for an unknown one, and for the id of a request that is running."""
        if adapter not in self._engines:
            known = ", ".join(self._adapters)
            raise UserError(f"request {request_id}: there is no adapter {adapter!r}; the adapters are {known}")
        if request_id in self.request_ids:
            raise UserError(f"request {request_id}: another request of this id is running; give each its own id")
        return self._engines[adapter]

    def add(
        self,
        request: Request,
        on_deltas: Callable[[list[Delta]], None] | None = None,
        on_sample: Callable[[int, Sample], None] | None = None,
    ) -> SequenceGroup:
        return self._of(request.adapter, request.request_id).add(request, on_deltas, on_sample)

    def add_scoring(
        self, token_ids: Iterable[int], temperature: float, request_id: str, adapter: str | None = None
    ) -> SequenceGroup:
        return self._of(adapter, request_id).add_scoring(token_ids, temperature, request_id, adapter)

    def add_likelihoods(
        self, token_ids: Iterable[int], top: int, start: int, request_id: str, adapter: str | None = None
    ) -> SequenceGroup:
        return self._of(adapter, request_id).add_likelihoods(token_ids, top, start, request_id, adapter)

    def step(self) -> list[SequenceGroup]:
        """Takes one step of the next engine that has work; returns the requests that finished."""
        for _ in self._engines:
            name = self._turns[0]
            self._turns.rotate(-1)
            if not self._engines[name].idle:
                self.adapter = name
                with self._attached(name):
                    return self._engines[name].step()
        return []

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceGroup]:
        return [group for engine in self._engines.values() for group in engine.abort(request_id, index)]

    def abort_all(self) -> None:
        for engine in self._engines.values():
            engine.abort_all()

    def commit(self, version: int, recompute: bool = False) -> None:
        for engine in self._engines.values():
            engine.commit(version, recompute)

    def forget_prefixes(self) -> None:
        for engine in self._engines.values():
            engine.forget_prefixes()

    def free_packed(self) -> None:
        for engine in self._engines.values():
            engine.free_packed()

    @property
    def request_ids(self) -> list[str]:
        return [one for engine in self._engines.values() for one in engine.request_ids]

    @property
    def idle(self) -> bool:
        return all(engine.idle for engine in self._engines.values())

    @property
    def recomputing(self) -> bool:
        return any(engine.recomputing for engine in self._engines.values())

    def stats(self) -> EngineStats:
        """Returns the sums over all engines; `cache_use` is of the whole cache, whose parts are equal."""
        found = [vars(engine.stats()) for engine in self._engines.values()]
        sums = {name: sum(one[name] for one in found) for name in found[0]}
        return EngineStats(**sums | {"cache_use": sums["cache_use"] / len(found)})
