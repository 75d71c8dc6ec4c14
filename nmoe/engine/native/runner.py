"""What the engine computes in a step: the model over pieces of prompts, over one token of every running row, and the draws.

It knows nothing of requests, nor of who holds which block.
"""

# Shapes: B running rows, T packed tokens, L tokens to score, V vocabulary, D width, Y layers, K chosen experts.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from nmoe.engine.native.attend import DecodeAttention, Piece, PrefillAttention
from nmoe.engine.native.cache import BLOCK_TOKENS, PagedCache
from nmoe.engine.native.graphs import DecodeGraphs
from nmoe.engine.native.rows import Rows
from nmoe.engine.native.sampler import SamplingColumns, diverged, sample
from nmoe.model.kernels.cpu.library import in_use
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.products import PackedWeights
from nmoe.model.transformer import Transformer
from nmoe.types import Sampling

# Weights up to this size are held a second time on a CPU, packed for small batches.
_PACKED_BYTES = 2 * 2**30


class Runner:
    """The learner's own module over the engine's cache and rows. On a GPU decoding goes by `graphs`."""

    def __init__(self, model: Transformer, cache: PagedCache, rows: Rows, graphs: DecodeGraphs | None) -> None:
        self.model, self.cache, self.rows, self.graphs = model, cache, rows, graphs
        size = sum(parameter.nbytes for parameter in model.parameters())
        self._packs = PackedWeights() if size <= _PACKED_BYTES else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """What is computed here takes packed weights and, unless numerics are exact, the CPU's kernels."""
        with self._packs.active() if self._packs else nullcontext(), nullcontext() if self.model.exact else in_use():
            yield

    def weights_changed(self) -> None:
        """Frees what was packed of the weights before."""
        if self._packs:
            self._packs.clear()

    def prefill(self, pieces: Sequence[Piece], token_ids: Sequence[int], replay_TYK: Tensor | None) -> Tensor:
        """Final hidden states `[T, D]` of the pieces' tokens, end to end, those that start at 0 first; keys, values and routes go
        to the cache. With `replay` the routes are those. Raises DivergenceError where a state is not finite: a prompt that ends
        before its logits are computed would leave its NaN in the cache."""
        device = self.rows.device
        attend = PrefillAttention(self.cache, pieces, self.model.exact)
        trace = RouterTrace(replay=None if replay_TYK is None else replay_TYK.to(device))
        positions_T = torch.from_numpy(attend.positions_T).to(device)
        x_TD: Tensor = self.model(torch.tensor(token_ids, device=device), positions_T, attend, trace)
        if trace.chosen_TK:
            routes_TYK = trace.routes() if trace.replay is None else trace.replay
            self.cache.write_routes(attend.blocks_T, attend.positions_T, routes_TYK)
        if not x_TD.isfinite().all():
            raise diverged("hidden states")
        return x_TD

    def logits(self, x_TD: Tensor, tokens: Sequence[int]) -> Tensor:
        """Of some of the tokens, `[len(tokens), V]`."""
        return self.model.logits(x_TD[torch.tensor(tokens, device=self.rows.device)])

    def scores(self, x_TD: Tensor, targets: Sequence[int], temperature: float) -> list[float]:
        """The log-probability of each target after the token of its row; the last row may have none. Raises DivergenceError where
        one is not finite."""
        if not targets:
            return []
        targets_L = torch.tensor(targets, device=self.rows.device)
        logprobs_L, _ = head_logprobs(
            x_TD[: len(targets)], self.model.head_weight, targets_L, temperature, exact=self.model.exact
        )
        if not logprobs_L.isfinite().all():
            raise diverged("log-probabilities")
        return logprobs_L.tolist()

    def decode(self, running: slice) -> Tensor:
        """Logits `[B, V]` after the last token of each row, which takes its position."""
        positions = self.rows.position[running].copy()
        table = self.rows.table[running, : int(self.rows.held[running].max())]
        if self.graphs is not None:
            x_BD, routes_BYK = self.graphs.run(self.rows["last_token"][running], positions, table)
        else:
            attend, trace = DecodeAttention(self.cache, positions, table, self.model.exact), RouterTrace()
            positions_B = torch.from_numpy(positions).to(self.rows.device)
            x_BD = self.model(self.rows["last_token"][running], positions_B, attend, trace)
            routes_BYK = trace.routes() if trace.chosen_TK else None
        if routes_BYK is not None:
            blocks_B = table[np.arange(len(positions)), positions // BLOCK_TOKENS]
            self.cache.write_routes(blocks_B, positions, routes_BYK)
        self.rows.position[running] += 1
        return self.model.logits(x_BD)

    def sample(
        self, logits_BV: Tensor, rows: slice, settings: Sequence[Sampling], version: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draws and records each row's next token, by `settings`, which are those of the rows. Returns which rows met a stop id and
        which are finished, `[B]` each, and the kept sets `[B, V]` where some row cuts its support."""
        columns = SamplingColumns(
            self.rows["temperature"][rows],
            self.rows["top_p"][rows],
            self.rows["top_k"][rows],
            plain=all(s.temperature == 1 for s in settings),
            cuts=any(s.top_p < 1 or s.top_k for s in settings),
        )
        at_B1 = torch.from_numpy(self.rows.generated[rows]).to(self.rows.device).unsqueeze(-1)
        uniforms_B = self.rows["uniforms"][rows].gather(1, at_B1).squeeze(-1)
        tokens_B, logprobs_B, kept_BV = sample(logits_BV, columns, uniforms_B)
        return *self.rows.record(rows, tokens_B, logprobs_B, version), kept_BV
