"""Decode on a GPU: the forward pass of all running sequences as one recorded CUDA graph, replayed on new inputs.

A decode step of a small model is a thousand launches of a few microseconds, more than the host can keep up with; a graph is one
launch. A graph needs fixed addresses and shapes: batches are padded to a few sizes, block tables to a few widths, and inputs lie in
buffers that each step overwrites. Padding writes to a block that nothing else uses. Weights, an adapter's included, are read in
place, so that an update in place needs no new recording; which modules have an adapter must not change.
"""

# Shapes: B sequences, M blocks of a sequence, P positions of a block, J key-value heads, D width, Y layers, K chosen experts.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmoe.engine.native.cache import BLOCK_TOKENS, PagedCache
from nmoe.model import recurrence
from nmoe.model.device import Record, kind_of, put
from nmoe.model.layers import LatentAttentionBlock
from nmoe.model.moe import RouterTrace, grouped_mm_fits
from nmoe.model.ops.attention import AttentionLayer, paged_attention
from nmoe.model.ops.table import ops_for
from nmoe.model.recurrence import RecurrentLayer, Spans
from nmoe.model.transformer import Transformer

# The narrowest block table that a graph is recorded for; each wider one doubles. One split of decode attention reads as much.
_LEAST_BLOCKS = 32


class PagedDecodeAttention:
    """The attention of decoding (an `Attend`) in a recorded graph: one query per sequence, to its cached positions and itself, read
    in place. All its inputs are tensors on the device, so that it can be recorded."""

    def __init__(
        self, cache: PagedCache, positions_B: Tensor, table_BM: Tensor, state_slots_B: Tensor, spans: Spans
    ) -> None:
        self.cache, self.table_BM, self.state_slots_B, self.spans = cache, table_BM, state_slots_B, spans
        self.lengths_B = (positions_B + 1).int()
        block_B1 = table_BM.gather(1, positions_B.div(BLOCK_TOKENS, rounding_mode="floor").unsqueeze(1)).long()
        heads_BJ = block_B1 * cache.attention.kv_heads + torch.arange(cache.attention.kv_heads, device=table_BM.device)
        self.key_index = (heads_BJ * BLOCK_TOKENS + positions_B.unsqueeze(1) % BLOCK_TOKENS).flatten()

    def __call__(self, layer: AttentionLayer, q_BHC: Tensor, k_BJC: Tensor, v_BJU: Tensor) -> Tensor:
        self.cache.attention.write(layer.index, self.key_index, k_BJC, v_BJU)
        keys_NJPC, values_NJPU = self.cache.attention.of_layer(layer.index)
        rows = (self.table_BM, self.lengths_B)
        return ops_for(q_BHC).paged_attention(layer, q_BHC, keys_NJPC, values_NJPU, *rows)

    def recur(self, layer: RecurrentLayer, x_BW: Tensor, decay_BH: Tensor, beta_BH: Tensor) -> Tensor:
        """Runs one token of every sequence through a recurrent layer, and returns the outputs, `[B, H, U]`."""
        states = self.cache.states
        assert states is not None, "the model has a recurrent layer"
        state = states.read(layer.index, self.state_slots_B)
        out_BHU, state = recurrence.run(layer, self.spans, x_BW, decay_BH, beta_BH, state, exact=False)
        states.write(layer.index, self.state_slots_B, state)
        return out_BHU

    def attend_latents(
        self, layer: AttentionLayer, q_BHC: Tensor, latents_BL: Tensor, block: LatentAttentionBlock
    ) -> Tensor:
        """Attends to the latents themselves, not to keys made from them. They are wider than the kernel's keys, so that this uses
        the reference implementation, which cannot be recorded."""
        self.cache.latents.write_latents(layer.index, self.key_index, latents_BL)
        latents_N1PL, _ = self.cache.attention.of_layer(layer.index)
        values_N1PR = latents_N1PL[..., : block.latent.kv_rank]
        rows = (self.table_BM, self.lengths_B)
        return block.from_latents(paged_attention(layer, block.to_latents(q_BHC), latents_N1PL, values_N1PR, *rows))


@dataclass
class _Graph:
    """One recorded graph: its input buffers, the function that replays it, and its results."""

    tokens_B: Tensor
    positions_B: Tensor
    table_BM: Tensor
    state_slots_B: Tensor
    states_BD: Tensor | None = None
    routes_BYK: Tensor | None = None
    replay: Callable[[], None] = lambda: None


class DecodeGraphs:
    """Runs the model's decode step over a cache, by a graph for each padded size. `scratch` is a block and a state slot that no
    sequence holds, and to which padding writes.

    The head is left out: it is two launches, and its logits over the whole vocabulary would be held once per recording.
    """

    def __init__(self, model: Transformer, cache: PagedCache, scratch: tuple[int, int], record: Record) -> None:
        self.model, self.cache, self.scratch, self.record = model, cache, scratch, record
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def run(
        self,
        tokens_B: Tensor,
        positions_B: NDArray[np.int64],
        table_BM: NDArray[np.int64],
        state_slots_B: NDArray[np.int64],
    ) -> tuple[Tensor, Tensor | None]:
        """Runs a decode step. Returns final hidden states `[B, D]` and router picks `[B, Y, K]` (None in a dense model) of tokens
        at their positions; the next call overwrites both. Keys and values go to the cache."""
        rows, blocks = table_BM.shape
        size = _at_least(rows, 1), _at_least(blocks, _LEAST_BLOCKS)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._recorded(*size)
        block, state_slot = self.scratch
        positions, table = np.zeros(size[0], dtype=np.int64), np.full(size, block, dtype=np.int32)
        positions[:rows], table[:rows, :blocks] = positions_B, table_BM
        state_slots = np.full(size[0], state_slot, dtype=np.int64)
        state_slots[:rows] = state_slots_B
        graph.tokens_B[:rows].copy_(tokens_B)
        graph.positions_B.copy_(put(positions, self.cache.device))
        graph.table_BM.copy_(put(table, self.cache.device))
        graph.state_slots_B.copy_(put(state_slots, self.cache.device))
        graph.replay()
        assert graph.states_BD is not None, "recording ran it"
        return graph.states_BD[:rows], None if graph.routes_BYK is None else graph.routes_BYK[:rows]

    def _recorded(self, rows: int, blocks: int) -> _Graph:
        device, (block, state_slot) = self.cache.device, self.scratch
        spans = Spans([1] * rows, device)
        if self.model.config.delta is not None:
            spans.taps(self.model.config.delta.conv_tokens)  # outside of the recording, which cannot copy from the host
        graph = _Graph(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.full((rows, blocks), block, dtype=torch.int32, device=device),
            torch.full((rows,), state_slot, dtype=torch.int64, device=device),
        )

        def step() -> None:
            inputs, trace = (graph.positions_B, graph.table_BM, graph.state_slots_B), RouterTrace()
            attend = PagedDecodeAttention(self.cache, *inputs, spans)
            graph.states_BD = self.model(graph.tokens_B, graph.positions_B, attend, trace)
            graph.routes_BYK = trace.routes() if trace.chosen_TK else None

        graph.replay = self.record(step)
        return graph


def decode_graphs(model: Transformer, cache: PagedCache, scratch: tuple[int, int]) -> DecodeGraphs:
    """Returns the decode step of a model on an accelerator. A model that cannot be recorded (`recordable`) runs unrecorded."""
    return DecodeGraphs(model, cache, scratch, kind_of(cache.device).recorder() if recordable(model) else run_plainly)


def recordable(model: Transformer) -> bool:
    """Returns whether a decode step can be recorded, because it never waits for the host. Experts wait if the host has to know
    their row counts, as to send them to other ranks, and so does attention to latents or, with exact numerics, in fp64."""
    weight = model.embedding.weight
    if model.exact or model.config.latent is not None or any(moe.dispatcher for moe in model.moe_layers()):
        return False
    if not model.config.routed_experts:
        return True
    adapters = [a for moe in model.moe_layers() for a in (moe.gate_up_adapter, moe.down_adapter) if a is not None]
    fits = grouped_mm_fits(weight[:1], model.config.expert_width, *(adapter.rank for adapter in adapters))
    return fits and kind_of(weight.device).records_groups(weight.device)


def run_plainly(run: Callable[[], None]) -> Callable[[], None]:
    """Stands in for a recorder, and records nothing: calls the function, and returns it, so that every replay is a call."""
    run()
    return run


def _at_least(count: int, least: int) -> int:
    """Returns the smallest `least * 2^k` that is at least `count`."""
    size = least
    while size < count:
        size *= 2
    return size
