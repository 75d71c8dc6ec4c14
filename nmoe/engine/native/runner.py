"""The runner computes a step with the model: chunks of prompts, the first tokens of sequences that start, and one token of every
running sequence. The scheduler chooses them."""

# Shapes: B slots, T packed tokens, L tokens to score, V vocabulary, D width, Y layers, K chosen experts.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmoe.engine.api import RawLogprob
from nmoe.engine.native.attend import DecodeAttention, Piece, PrefillAttention
from nmoe.engine.native.cache import BLOCK_TOKENS, PagedCache
from nmoe.engine.native.graphs import DecodeGraphs
from nmoe.engine.native.sampler import SamplingColumns, diverged, penalized, raw_logprobs, sample
from nmoe.engine.native.scheduler import Chunk, Start
from nmoe.engine.native.sequence import RunningBatch, Sequence
from nmoe.model.device import fetch, put
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.ops.cpu.packing import PackedWeights, kernels_in_use
from nmoe.model.transformer import Transformer

# Logits that raw scores are computed from at once.
_PIECE_LOGITS = 2**20

# Weights up to this size are held a second time on a CPU, packed for small batches.
PACKED_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Sampled:
    """The sampled tokens of the sequences in `slots`, on the host: tokens and their log-probabilities, whether each is a stop
    token, and whether its sequence has finished, `[B]` each; and by row, for rows with top-k, top-p or min_p, the ids of the tokens
    that these left, and for rows that want them the raw log-probabilities."""

    slots: slice
    tokens_B: Tensor
    logprobs_B: Tensor
    stopped_B: Tensor
    finished_B: Tensor
    kept_ids: dict[int, list[int]]
    raw: dict[int, RawLogprob]


class Runner:
    """Runs the learner's module over the engine's cache and running batch. On a GPU, decoding replays `graphs`.

    `version` is the version of the module's weights. `packs` are their packed forms, which runners of one module share; None if the
    model is too large.
    """

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache,
        running: RunningBatch,
        graphs: DecodeGraphs | None,
        packs: PackedWeights | None = None,
    ) -> None:
        self.model, self.cache, self.running, self.graphs = model, cache, running, graphs
        self.version = 0
        size = sum(parameter.nbytes for parameter in model.parameters())
        self.packs = packs or (PackedWeights() if size <= PACKED_BYTES else None)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Opens a context in which computations use packed weights, if the model is small enough to hold its weights twice, and,
        unless numerics are exact, the CPU kernels."""
        with (
            self.packs.active() if self.packs else nullcontext(),
            nullcontext() if self.model.exact else kernels_in_use(),
        ):
            yield

    def weights_changed(self, version: int) -> None:
        """Notes the new version, and frees the packed forms of the old weights."""
        self.version = version
        self.free_packed()

    def free_packed(self) -> None:
        """Frees the packed forms of the weights; the next forward pass packs them again."""
        if self.packs:
            self.packs.clear()

    def prefill(self, chunks: list[Chunk]) -> dict[Sequence, Tensor]:
        """Runs the model on the chunks: keys, values and routes go to the cache, log-probabilities to the sequences that are only
        scored. Returns the logits `[1, V]` after each prompt that is complete. Raises DivergenceError if the model computes NaN or
        infinity.

        Chunks that replay routes run in a separate forward pass, after the others.
        """
        logits: dict[Sequence, Tensor] = {}
        for replays in (False, True):
            part = [chunk for chunk in chunks if (chunk.sequence.routes_LYK is not None) == replays]
            if part:
                logits |= self._prefill(part, replays)
        return logits

    def _prefill(self, chunks: list[Chunk], replays: bool) -> dict[Sequence, Tensor]:
        replay_TYK = torch.cat([_replayed(chunk) for chunk in chunks]) if replays else None
        x_TD = self._states(chunks, replay_TYK)
        end, prompts = 0, {}
        for chunk in chunks:
            start, end = end, end + chunk.stop - chunk.start
            sequence = chunk.sequence
            if sequence.group.scoring and sequence.group.request.top_logprobs is not None:
                first = max(chunk.start, sequence.group.scored_from - 1)
                targets = sequence.prefill_ids[first + 1 : chunk.stop + 1]
                rows = x_TD[start + first - chunk.start : end]
                sequence.raw += self._raw_scores(rows, targets, sequence.group.request.top_logprobs)
            elif sequence.group.scoring:
                targets = sequence.prefill_ids[chunk.start + 1 : chunk.stop + 1]
                sequence.logprobs += self._scores(x_TD[start:end], targets, sequence.group.request.sampling.temperature)
            elif chunk.last and not sequence.started:
                prompts[sequence] = end - 1
        if not prompts:
            return {}
        rows = put(list(prompts.values()), x_TD.device)
        return dict(zip(prompts, self.model.logits(x_TD[rows]).split(1), strict=True))

    def _states(self, chunks: list[Chunk], replay_TYK: Tensor | None) -> Tensor:
        """Computes the final hidden states `[T, D]` of the chunks' tokens, concatenated; chunks that start at position 0 come
        first. With `replay_TYK` the routers' picks are replaced by these. Raises DivergenceError if a state is not finite: a prompt
        that ends before its logits are computed would leave NaN in the cache."""
        device = self.running.device
        pieces = [
            Piece(chunk.sequence.block_table, chunk.sequence.state_slot, chunk.start, chunk.stop) for chunk in chunks
        ]
        token_ids = [token for chunk in chunks for token in chunk.sequence.prefill_ids[chunk.start : chunk.stop]]
        attend = PrefillAttention(self.cache, pieces, self.model.exact)
        trace = RouterTrace(replay=None if replay_TYK is None else put(replay_TYK, device))
        positions_T = put(attend.positions_T, device)
        x_TD: Tensor = self.model(put(token_ids, device), positions_T, attend, trace)
        if self.cache.routes is not None:
            routes_TYK = trace.routes() if trace.replay is None else trace.replay
            self.cache.routes.write(attend.blocks_T, attend.positions_T, routes_TYK)
        if not x_TD.isfinite().all():
            raise diverged("hidden states")
        return x_TD

    def _scores(self, x_TD: Tensor, targets: list[int], temperature: float) -> list[float]:
        """Computes the log-probability of each target after the token of its row; the last row may have no target. Raises
        DivergenceError if one is not finite."""
        if not targets:
            return []
        targets_L = put(targets, self.running.device)
        logprobs_L, _ = head_logprobs(
            x_TD[: len(targets)], self.model.head_weight, targets_L, temperature, exact=self.model.exact
        )
        (logprobs_L,) = fetch(logprobs_L)
        if not logprobs_L.isfinite().all():
            raise diverged("log-probabilities")
        return logprobs_L.tolist()

    def _raw_scores(self, x_TD: Tensor, targets: list[int], most: int) -> list[RawLogprob]:
        """Computes the raw log-probability of each target after the token of its row, and the likeliest tokens there; the last row
        may have no target. Raises DivergenceError if one is not finite."""
        scores: list[RawLogprob] = []
        rows = max(1, _PIECE_LOGITS // self.model.config.vocab_size)
        for first in range(0, len(targets), rows):
            of_piece = targets[first : first + rows]
            logits_LV = self.model.logits(x_TD[first : first + len(of_piece)])
            scores += self._raw(logits_LV, put(of_piece, self.running.device), [most] * len(of_piece))
        return scores

    def _raw(self, logits_LV: Tensor, targets_L: Tensor, most: list[int]) -> list[RawLogprob]:
        """Returns the raw log-probability of each target, and so many of the likeliest tokens of its row."""
        columns = fetch(*raw_logprobs(logits_LV, targets_L, max(most)))
        if not columns[0].isfinite().all():
            raise diverged("log-probabilities")
        rows = zip(*(column.tolist() for column in columns), most, strict=True)
        return [RawLogprob(found, tuple(zip(ids[:k], values[:k], strict=True))) for found, values, ids, k in rows]

    def start(self, start: Start) -> Sampled:
        """Samples the first token of the sequences that start, from the logits of their prompts, after copying their last blocks
        and states."""
        self.cache.copy(start.blocks, start.states)
        logits_BV = torch.cat([prompt.logits_1V.expand(count, -1) for prompt, count in start.prompts])
        return self._sample(logits_BV, start.slots)

    def decode(self, slots: slice) -> Sampled:
        """Samples the next token of every sequence in the slots: runs the model on its last token, whose key and value go to the
        cache."""
        running = self.running
        positions = running.position[slots].copy()
        table = running.table[slots, : int(running.held[slots].max())]
        state_slots = running.state_slot[slots].copy()
        if self.graphs is not None:
            x_BD, routes_BYK = self.graphs.run(running["last_token"][slots], positions, table, state_slots)
        else:
            attend, trace = DecodeAttention(self.cache, positions, table, state_slots, self.model.exact), RouterTrace()
            positions_B = put(positions, running.device)
            x_BD = self.model(running["last_token"][slots], positions_B, attend, trace)
            routes_BYK = trace.routes() if trace.chosen_TK else None
        if self.cache.routes is not None and routes_BYK is not None:
            blocks_B = table[np.arange(len(positions)), positions // BLOCK_TOKENS]
            self.cache.routes.write(blocks_B, positions, routes_BYK)
        running.position[slots] += 1
        return self._sample(self.model.logits(x_BD), slots)

    def _sample(self, logits_BV: Tensor, slots: slice) -> Sampled:
        """Draws each sequence's next token, records it in the running batch, and returns the tokens."""
        running, untouched_BV = self.running, logits_BV
        if running.adjusts[slots].any():
            logits_BV = self._adjusted(logits_BV, slots)
        cuts = bool(running.cuts[slots].any())
        least = running.min_p[slots].copy() if cuts and running.min_p[slots].any() else None
        columns = SamplingColumns(
            running["temperature"][slots],
            running["top_p"][slots],
            running["top_k"][slots],
            plain=bool(running.plain[slots].all()),
            cuts=cuts,
            min_p_B=None if least is None else put(least, running.device),
        )
        at_B1 = put(running.generated[slots], running.device).unsqueeze(-1)
        uniforms_B = running["uniforms"][slots].gather(1, at_B1).squeeze(-1)
        tokens_B, logprobs_B, kept_BV = sample(logits_BV, columns, uniforms_B)
        stopped_B, finished_B = running.record(slots, tokens_B, logprobs_B, self.version)
        kept_ids = {} if kept_BV is None else self._kept_ids(kept_BV, running.cuts[slots].nonzero()[0])
        raw = self._raw_of(untouched_BV, tokens_B, slots) if running.raw[slots].any() else {}
        tokens_B, logprobs_B, stopped_B, finished_B = fetch(tokens_B, logprobs_B.float(), stopped_B, finished_B)
        return Sampled(slots, tokens_B, logprobs_B, stopped_B, finished_B, kept_ids, raw)

    def _adjusted(self, logits_BV: Tensor, slots: slice) -> Tensor:
        """Returns the logits after penalties and bias, in the rows that have any."""
        running, device = self.running, self.running.device
        rows = running.adjusts[slots].nonzero()[0]
        rows_X, at = put(rows, device), rows + slots.start
        sampled = running.generated[at]
        logits_XV = penalized(
            logits_BV[rows_X],
            running["tokens"][put(at, device), : int(sampled.max())],
            *(put(column, device) for column in (sampled, running.presence[at], running.frequency[at])),
        )
        biases = [running.sequences[slot].group.request.sampling.logit_bias for slot in at.tolist()]
        row_Z = [row for row, bias in enumerate(biases) for _ in bias]
        id_Z, value_Z = [one for bias in biases for one, _ in bias], [value for bias in biases for _, value in bias]
        values_Z = put(np.array(value_Z, dtype=np.float32), device).to(logits_BV.dtype)
        logits_XV.index_put_((put(row_Z, device), put(id_Z, device)), values_Z, accumulate=True)
        return logits_BV.index_copy(0, rows_X, logits_XV)

    def _raw_of(self, logits_BV: Tensor, tokens_B: Tensor, slots: slice) -> dict[int, RawLogprob]:
        """Returns the raw log-probabilities of the rows that want them, by row."""
        rows = self.running.raw[slots].nonzero()[0].tolist()
        rows_X = put(rows, logits_BV.device)
        most = [self.running.sequences[slots.start + row].group.request.top_logprobs or 0 for row in rows]
        return dict(zip(rows, self._raw(logits_BV[rows_X], tokens_B[rows_X], most), strict=True))

    def _kept_ids(self, kept_BV: Tensor, rows: NDArray[np.int64]) -> dict[int, list[int]]:
        """Returns for each of these rows the ids of the tokens that top-k, top-p and min_p left, by row."""
        row_X, id_X = fetch(*kept_BV.index_select(0, put(rows, kept_BV.device)).nonzero().unbind(-1))
        ids = id_X.split(row_X.bincount(minlength=len(rows)).tolist())
        return {row: of_row.tolist() for row, of_row in zip(rows.tolist(), ids, strict=True)}


def _replayed(chunk: Chunk) -> Tensor:
    """Returns the router picks that a chunk replays, `[T, Y, K]`."""
    routes_LYK = chunk.sequence.routes_LYK
    assert routes_LYK is not None, "only chunks with routes are asked for them"
    return routes_LYK[chunk.start : chunk.stop]
