"""An engine of one rank of several that hold a part of each layer's experts: their forward passes go in step.

A forward pass exchanges rows in every layer with experts, which all ranks have to take part in. So each pass begins with a tick, a
sum over all ranks: how many of them have something to compute, and how many stay. A rank that has nothing to compute ticks, too,
and then runs the layers of experts on the rows of the others alone. Ranks need not have the same number of passes: the next tick
brings them together again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from nmoe.engine.native.engine import NativeEngine, resolve
from nmoe.model.moe import RouterTrace
from nmoe.model.transformer import Transformer

# Between two ticks of ranks that all have nothing to compute.
_IDLE_S = 0.002


class InStepEngine(NativeEngine):
    """A native engine whose model holds a rank's own experts. It samples between `join` and `leave`, which every rank has to
    call."""

    def __init__(self, model: Transformer, max_sequences: int, cache_mb: int = 0) -> None:
        super().__init__(model, max_sequences, cache_mb)
        self._divided = [moe for moe in model.moe_layers() if moe.dispatcher is not None]
        self._joined = self._stays = self._busy = False  # of the stepping thread only
        self._left: asyncio.Future[None] | None = None  # ends once all ranks leave
        model.register_forward_pre_hook(self._begin_pass)

    def join(self) -> None:
        """Has the engine go in step with the other ranks, from its next step on."""

        def act() -> None:
            self._joined = self._stays = True

        self._flush(act)

    async def leave(self) -> None:
        """Ends this engine's requests, and waits until all ranks leave. Until then it takes part in their passes."""
        left: asyncio.Future[None] = self._waiter()

        def act() -> None:
            for request_id in self._engine.request_ids:
                self._finish(self._engine.abort(request_id))
            self._stays, self._left = False, left

        self._flush(act)
        await left

    def _give_up(self, error: BaseException) -> None:
        self._joined = False  # the other ranks are not in step any more
        super()._give_up(error)

    def _begin_pass(self, *_: Any) -> None:
        self._tick(True)

    def _tick(self, computes: bool) -> bool:
        """Counts with the other ranks who computes and who stays. Returns whether any rank stays."""
        if not self._joined:
            raise RuntimeError("the ranks have left, and their experts with them")
        ranks = torch.tensor([computes, self._stays], dtype=torch.int32)
        dist.all_reduce(ranks)
        computing, staying = ranks.tolist()
        self._busy = computing > 0
        return bool(staying)

    def _turn(self, outcome: Future[Any]) -> None:
        if not self._joined:
            super()._turn(outcome)
            return
        with self._wake:
            if not (self._has_work or self._busy):
                self._wake.wait_for(lambda: self._inbox, _IDLE_S)
            actions, self._inbox = self._inbox, []
        for action in actions:
            action()
        if self._has_work:
            self._step()
            return
        stays = self._tick(False)
        if self._busy:
            self._compute_for_others()
        if not stays:
            self._joined, left, self._left = False, self._left, None
            assert left is not None, "all ranks leave, and so does this one"
            self._settle(left, resolve, None)

    @torch.inference_mode()
    def _compute_for_others(self) -> None:
        """Runs this rank's experts on rows of the other ranks."""
        weight = self._engine.model.embedding.weight
        for moe in self._divided:
            moe(weight.new_empty(0, weight.shape[1]), RouterTrace())
