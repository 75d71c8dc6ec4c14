"""Sampling on every rank of `torch.distributed`: the caller uses one engine, which hands its requests to a native engine on each
rank.

A rank's engine runs whole weights, which are gathered when the learner publishes, since a sharded model would gather each layer
anew for every token. With expert parallelism it holds only its own experts of each layer, and the ranks' forward passes go in step
(`nmoe.engine.native.in_step`). Requests are dealt to the rank with the least left to sample. Which rank a request reaches changes
no sample: its seed derives from the request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from nmoe.engine.api import Engine, EngineStats, Request
from nmoe.engine.dealing import Dealing
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.native.in_step import InStepEngine
from nmoe.errors import UserError
from nmoe.model.checkpoint import new_model, packed_form
from nmoe.model.lora import Lora
from nmoe.model.moe import MoE
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import Controller, Member, command, everywhere, gang
from nmoe.parallel.ranks import release, whole
from nmoe.types import Sample

R = TypeVar("R")


class Trained(Protocol):
    """The part of a learner that the engine uses: its model, and the adapter if it trains one."""

    model: Transformer
    lora: Lora | None


def sampling_engine(learner: Trained, max_sequences: int, cache_mb: int = 0, expert_parallel: bool = False) -> Engine:
    """Returns the engine that samples a learner's model: in this process or, if there are several ranks, on all of them.
    `max_sequences` and `cache_mb` apply to each rank. With `expert_parallel` several ranks divide the experts as the learner does.
    Raises UserError if it does not divide them."""
    if gang().size == 1:
        return NativeEngine(learner.model, max_sequences, cache_mb)
    if expert_parallel and not any(moe.dispatcher for moe in learner.model.moe_layers()):
        raise UserError(
            "engine.expert_parallel = true: the ranks of this run share no experts; set parallel.ep above 1, or leave it out"
        )
    return RanksEngine(everywhere(RankSampler, learner, max_sequences, cache_mb, expert_parallel))


@dataclass(frozen=True)
class _Asked:
    number: int
    request: Request


@dataclass(frozen=True)
class _Aborted:
    request_id: str


@dataclass(frozen=True)
class _Sampled:
    """A rank's message: one sample of a request with its index or, without a sample, the end of the request, with the error if
    there was one."""

    number: int
    sample: tuple[int, Sample] | None = None
    error: str | None = None


class RankSampler:
    """Holds the whole weights of a sharded model on one rank, or with `expert_parallel` all but the experts of other ranks, and the
    engine that samples with them. Packed experts are the sharded model's own."""

    def __init__(self, learner: Trained, max_sequences: int, cache_mb: int, expert_parallel: bool) -> None:
        # Imported here because it takes 0.6 s, which only several ranks should cost.
        from nmoe.parallel.dispatcher import Dispatcher

        model = self._sharded = learner.model
        self._divided = {
            name: moe.dispatcher
            for name, moe in model.named_modules()
            if expert_parallel and isinstance(moe, MoE) and isinstance(moe.dispatcher, Dispatcher)
        }
        dtype, form = model.embedding.weight.dtype, packed_form(model)
        self.model = new_model(model.config, dtype, model.device, form, self._divide).requires_grad_(False)
        for own, trained in zip(self.model.moe_layers(), model.moe_layers(), strict=True):
            own.gate_up_packed, own.down_packed = trained.gate_up_packed, trained.down_packed
        self.model.set_numerics("exact" if model.exact else "fast")
        self.model.generation = model.generation
        if (lora := learner.lora) is not None:
            Lora(self.model, lora.settings, lora.sites, lora.base, lora.fingerprint)
        self.gather()
        engine = InStepEngine if self._divided else NativeEngine
        self.engine = engine(self.model, max_sequences, cache_mb)

    def _divide(self, model: Transformer) -> torch.device:
        """Leaves this rank its own experts, before memory is allocated, and returns where that is."""
        from nmoe.parallel.dispatcher import HeldDispatcher

        for name, dispatcher in self._divided.items():
            moe = model.get_submodule(name)
            assert isinstance(moe, MoE), "as the learner's model has it"
            for weight, parameter in list(moe.named_parameters(recurse=False)):
                setattr(moe, weight, nn.Parameter(dispatcher.own(parameter.detach()).clone()))
            moe.dispatcher, moe.sharded = HeldDispatcher(dispatcher.groups, dispatcher.rank), True
        return self._sharded.device

    @command
    @torch.no_grad()
    def gather(self) -> None:
        """Gathers the learner's present weights from all ranks, one tensor at a time. Raises RuntimeError if the ranks then hold
        different weights."""
        release(self._sharded)
        own, check = self.model.state_dict(), torch.zeros((), dtype=torch.int64)
        for name, tensor in self._sharded.state_dict().items():
            gathered = whole(tensor)
            layer = re.sub(r"(\.(gate_up|down)_adapter)?\.\w+$", "", name)
            dispatcher = self._divided.get(layer)
            own[name].copy_(gathered if dispatcher is None else dispatcher.own(gathered))
            check += gathered.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64).cpu()
        checks = [torch.zeros_like(check) for _ in range(gang().size)]
        dist.all_gather(checks, check)
        if len({int(one) for one in checks}) > 1:
            raise RuntimeError(f"ranks gathered different weights: {[int(one) for one in checks]}")

    @command
    def forget_prefixes(self) -> None:
        self.engine.forget_prefixes()

    @command
    def sleep(self) -> None:
        self.engine.sleep()

    def serve(self, version: int) -> EngineStats:
        """Answers requests of the first rank, which controls the others, under this version of the weights, until it ends the
        service. Returns the engine's statistics."""
        self.engine.run(self._serve(version))
        return self.engine.stats()

    async def _serve(self, version: int) -> None:
        member = gang()
        assert isinstance(member, Member), "the controller asks its own engine"
        await self.engine.update_weights(self.model, version)
        if isinstance(self.engine, InStepEngine):
            self.engine.join()
        messages: asyncio.Queue[Any] = asyncio.Queue()
        loop, connection, running = asyncio.get_running_loop(), member.connection, set[asyncio.Task[None]]()

        def read() -> None:
            try:
                while connection.poll():
                    messages.put_nowait(member.receive())
            except (EOFError, ConnectionError):  # the controller is gone: that was all
                loop.remove_reader(connection.fileno())
                messages.put_nowait(None)

        async def answer(asked: _Asked) -> None:
            error = None
            try:
                async for sample in self.engine.samples(asked.request):
                    member.send(_Sampled(asked.number, sample))
            except UserError as refusal:
                error = str(refusal)
            member.send(_Sampled(asked.number, error=error))

        loop.add_reader(connection.fileno(), read)
        try:
            while (asked := await messages.get()) is not None:
                for one in asked:
                    if isinstance(one, _Aborted):
                        self.engine.abort(one.request_id)
                        continue
                    task = asyncio.create_task(answer(one))
                    running.add(task)
                    task.add_done_callback(running.discard)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if isinstance(self.engine, InStepEngine):
                await self.engine.leave()
        finally:
            loop.remove_reader(connection.fileno())


class RanksEngine:
    """An engine over all ranks (an `Engine`), for the first rank, which controls the others. A request is sampled on the rank with
    the fewest tokens left to sample, as expected."""

    def __init__(self, sampler: RankSampler) -> None:
        controller = gang()
        assert isinstance(controller, Controller), "ranks have a controller"
        self._gang, self._sampler, self._own = controller, sampler, sampler.engine
        self._version, self._asked = 0, 0
        self._serving = False  # whether members wait for requests
        self._waiting: dict[int, asyncio.Queue[_Sampled]] = {}
        self._outbox: dict[int, list[_Asked | _Aborted]] = {}
        self._dealing = Dealing(controller.size)
        self._stats: list[EngineStats] = []
        self._failed: Exception | None = None  # why a member left while it served

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine that uses this engine to its end, and returns its result. The other ranks sample meanwhile, from the
        first request that one of them gets. Raises the error of a rank that fails."""
        try:
            return self._own.run(self._around(coroutine))
        except RuntimeError as error:  # as torch raises where another rank has left a forward pass
            raise self._failed or self._gang.explained(error) from error

    async def _around(self, coroutine: Coroutine[Any, Any, R]) -> R:
        loop, ranks = asyncio.get_running_loop(), range(1, self._gang.size)
        connections = {rank: self._gang.connections[rank - 1] for rank in ranks}
        task = asyncio.ensure_future(coroutine)
        self._failed = None

        def read(rank: int) -> None:
            try:
                while self._serving and connections[rank].poll():
                    self._take(self._gang.answer(rank))
            except Exception as error:
                loop.remove_reader(connections[rank].fileno())
                self._failed = error
                task.cancel()

        for rank in ranks:
            loop.add_reader(connections[rank].fileno(), read, rank)
        try:
            result = await task
        except asyncio.CancelledError:
            if self._failed is not None:
                raise self._failed from None
            raise
        finally:
            for rank in ranks:
                loop.remove_reader(connections[rank].fileno())
            if self._serving and self._failed is None:
                await self._end()
        return result

    def _begin(self) -> None:
        """Has the other ranks answer requests, if they do not yet."""
        if not self._serving:
            self._gang.begin(self._sampler.serve, self._version)
            self._serving = True
            if isinstance(self._own, InStepEngine):
                self._own.join()

    async def _end(self) -> None:
        """Ends the other ranks' sampling, drops their late messages, and keeps their statistics."""
        self._serving, self._stats = False, []
        for rank in range(1, self._gang.size):
            self._gang.send(rank, None)
        if isinstance(self._own, InStepEngine):
            await self._own.leave()
        for rank in range(1, self._gang.size):
            while isinstance(answer := self._gang.answer(rank), _Sampled):
                pass
            self._stats.append(answer)
        self._waiting.clear()
        self._outbox.clear()
        self._dealing.left = [0.0] * self._gang.size

    def _take(self, answer: _Sampled) -> None:
        if (waiting := self._waiting.get(answer.number)) is not None:
            waiting.put_nowait(answer)

    async def generate(self, request: Request) -> list[Sample]:
        samples = {index: sample async for index, sample in self.samples(request)}
        return [samples[index] for index in range(request.samples)]

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        if isinstance(self._own, InStepEngine):
            self._begin()
        rank = self._dealing.choose(range(self._gang.size), request)
        with self._dealing.dealt(rank, request) as finished:
            async for index, sample in self._own.samples(request) if rank == 0 else self._of_member(rank, request):
                finished(len(sample.token_ids))
                yield index, sample

    async def _of_member(self, rank: int, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        self._asked += 1
        asked, answers = _Asked(self._asked, request), asyncio.Queue[_Sampled]()
        self._waiting[asked.number] = answers
        self._post(rank, asked)
        ended = False
        try:
            while (answer := await answers.get()).sample is not None:
                yield answer.sample
            ended = True
            if answer.error is not None:
                raise UserError(answer.error)
        finally:
            self._waiting.pop(asked.number, None)
            if not ended and self._serving:  # else its rank has ended it, and would serve anew
                self._post(rank, _Aborted(request.request_id))

    def _post(self, rank: int, message: _Asked | _Aborted) -> None:
        """Sends a message to a rank at the end of this turn of the event loop, so that requests made together reach it together."""
        self._begin()
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.setdefault(rank, []).append(message)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for rank, messages in outbox.items():
            if self._serving:
                self._gang.send(rank, messages)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        if isinstance(self._own, InStepEngine):
            self._begin()
        return await self._own.score(token_ids, temperature)

    async def update_weights(self, source: Transformer | Lora, version: int) -> None:
        """Takes the learner's weights under a new version: each rank gathers them whole. To be called only while no other rank
        samples."""
        assert not self._serving, "weights change between two calls of `run`"
        self._sampler.gather()
        self._version = version
        await self._own.update_weights(self._sampler.model, version)

    def forget_prefixes(self) -> None:
        self._sampler.forget_prefixes()

    def sleep(self) -> None:
        """Frees the packed forms of each rank's weights, which its next forward pass makes again."""
        self._sampler.sleep()

    def metrics(self) -> dict[str, float]:
        return {}

    def stats(self) -> EngineStats:
        """Returns the totals over all ranks, of the other ranks as of their last service; `cache_use` is the mean."""
        ranks = [self._own.stats(), *self._stats]
        totals = {f.name: sum(getattr(one, f.name) for one in ranks) for f in fields(EngineStats)}
        totals["cache_use"] /= len(ranks)
        return EngineStats(**totals)
