"""Attention to the cache: of whole or partial prompts, and of one query per running sequence."""

# Shapes: T packed tokens, B running rows, M blocks of a row, P positions of a block, L = M * P, H query heads, J key-value
# heads, G = H / J, C key width, U value width, W either, L (after P positions or R rows of them) latents and rotated keys together.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nmoe.engine.native.cache import BLOCK_TOKENS, PagedCache
from nmoe.model import recurrence
from nmoe.model.device import put
from nmoe.model.layers import LatentAttentionBlock
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.ops.exact.order_free import attention as order_free_attention
from nmoe.model.ops.table import ops_for
from nmoe.model.packed import PackedAttention
from nmoe.model.recurrence import RecurrentLayer, Spans

# Sequences are gathered together if the shortest has at least this share of the longest one's blocks. A lower share gathers and
# multiplies more masked positions, a higher one launches more kernels.
_BUCKET_SHARE = 0.6


@dataclass(frozen=True)
class Piece:
    """A part of a sequence to compute in one pass: positions `start` to `stop` (exclusive), after earlier ones that are in the
    cache. `blocks` is the sequence's block table, `state_slot` its state slot in the cache."""

    blocks: Sequence[int]
    state_slot: int
    start: int
    stop: int


class PrefillAttention:
    """The attention of prefill (an `Attend`): over pieces of sequences, concatenated without padding, pieces that start at position
    0 first. It writes their keys and values to the cache."""

    def __init__(self, cache: PagedCache, pieces: Sequence[Piece], exact: bool) -> None:
        self.cache, self.pieces = cache, pieces
        self.exact = ops_for(cache.attention.keys, exact).exact
        positions_T = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        spans = [np.asarray(piece.blocks, dtype=np.int64) for piece in pieces]
        blocks_T = np.concatenate(
            [
                blocks[np.arange(piece.start, piece.stop) // BLOCK_TOKENS]
                for piece, blocks in zip(pieces, spans, strict=True)
            ]
        )
        self.positions_T, self.blocks_T = positions_T, blocks_T
        self.key_index = cache.attention.key_index(blocks_T, positions_T)
        self.recurrence = _Recurrence(
            cache, [piece.stop - piece.start for piece in pieces], [p.state_slot for p in pieces]
        )
        fresh = [piece for piece in pieces if piece.start == 0]
        self.fresh = sum(piece.stop for piece in fresh)
        self.packed = PackedAttention([piece.stop for piece in fresh], cache.device, exact) if fresh else None
        self.later: list[tuple[Piece, Tensor]] = []
        for piece, blocks in zip(pieces[len(fresh) :], spans[len(fresh) :], strict=True):
            held = blocks[: -(-piece.stop // BLOCK_TOKENS)]
            self.later.append((piece, cache.attention.gather_index(held[None])))

    def recur(self, layer: RecurrentLayer, x_TW: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
        """Runs a recurrent layer and returns its outputs, `[T, H, U]`: new sequences begin from an empty state, the others from
        their cached states."""
        fresh = 0 if self.packed is None else len(self.packed.lengths)
        return self.recurrence(layer, x_TW, decay_TH, beta_TH, self.exact, fresh)

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pieces' block tables, `[pieces, M]`, and each token's position and the index of its piece, `[T]` each."""
        table = np.zeros((len(self.pieces), max(len(piece.blocks) for piece in self.pieces)), dtype=np.int64)
        for row, piece in zip(table, self.pieces, strict=True):
            row[: len(piece.blocks)] = piece.blocks
        piece_T = np.repeat(np.arange(len(self.pieces)), [piece.stop - piece.start for piece in self.pieces])
        return torch.from_numpy(table), torch.from_numpy(self.positions_T), torch.from_numpy(piece_T)

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        self.cache.attention.write(layer.index, self.key_index, k_TJC, v_TJU)
        ops = ops_for(q_THC, self.exact)
        if self.exact and ops.attends_in_blocks:
            return ops.attend_in_blocks(layer, q_THC, *self.cache.attention.of_layer(layer.index), *self._rows)
        parts = []
        if self.packed is not None:
            parts.append(self.packed(layer, q_THC[: self.fresh], k_TJC[: self.fresh], v_TJU[: self.fresh]))
        start = self.fresh
        for piece, index in self.later:
            stop = start + piece.stop - piece.start
            k_JLC, v_JLU = self.cache.attention.gather(layer.index, index, 1)
            k_LJC, v_LJU = (x[:, : piece.stop].transpose(0, 1) for x in (k_JLC, v_JLU))
            parts.append(_after_earlier(layer, q_THC[start:stop], k_LJC, v_LJU, piece.start, self.exact))
            start = stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_latents(
        self, layer: AttentionLayer, q_THC: Tensor, latents_TL: Tensor, block: LatentAttentionBlock
    ) -> Tensor:
        """Writes the latents to the cache, attends to keys and values made from the latents of all positions, as the learner makes
        them, and returns the results, `[T, H, U]`."""
        self.cache.latents.write_latents(layer.index, self.key_index, latents_TL)
        parts = []
        if self.packed is not None:
            parts.append(self.packed(layer, q_THC[: self.fresh], *block.expanded(latents_TL[: self.fresh])))
        start = self.fresh
        for piece, index in self.later:
            stop = start + piece.stop - piece.start
            cached_1PL, _ = self.cache.attention.gather(layer.index, index, 1)
            k_PHC, v_PHU = block.expanded(cached_1PL[0, : piece.stop].to(latents_TL.dtype))
            q_NHC = q_THC[start:stop]
            ops = ops_for(q_THC, self.exact)
            if self.exact and ops.attends_in_blocks:
                table_1M = torch.arange(-(-piece.stop // BLOCK_TOKENS)).unsqueeze(0)
                rows = (table_1M, torch.arange(piece.start, piece.stop), torch.zeros(len(q_NHC), dtype=torch.int64))
                parts.append(ops.attend_in_blocks(layer, q_NHC, _in_blocks(k_PHC), _in_blocks(v_PHU), *rows))
            else:
                parts.append(_after_earlier(layer, q_NHC, k_PHC, v_PHU, piece.start, self.exact))
            start = stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Recurrence:
    """Runs recurrent layers from the states in these state slots of the cache, and writes the new states there."""

    def __init__(
        self, cache: PagedCache, lengths: Sequence[int], state_slots: Sequence[int] | NDArray[np.int64]
    ) -> None:
        self.cache, self.lengths, self.state_slots = cache, lengths, state_slots

    @cached_property
    def indices(self) -> tuple[Spans, Tensor]:
        """The spans of the sequences in the tokens, and their state slots on the device. They are built when a recurrent layer
        first needs them."""
        return Spans(self.lengths, self.cache.device), put(self.state_slots, self.cache.device)

    def __call__(
        self, layer: RecurrentLayer, x_TW: Tensor, decay_TH: Tensor, beta_TH: Tensor, exact: bool, fresh: int = 0
    ) -> Tensor:
        """Runs a recurrent layer over the tokens of all sequences and returns its outputs, `[T, H, U]`. The first `fresh` sequences
        begin from an empty state."""
        states = self.cache.states
        assert states is not None, "the model has a recurrent layer"
        spans, state_slots_B = self.indices
        state = states.read(layer.index, state_slots_B, fresh)
        out_THU, state = recurrence.run(layer, spans, x_TW, decay_TH, beta_TH, state, exact)
        states.write(layer.index, state_slots_B, state)
        return out_THU


def _after_earlier(
    layer: AttentionLayer, q_THC: Tensor, k_PJC: Tensor, v_PJU: Tensor, earlier: int, exact: bool
) -> Tensor:
    """Computes the attention of the last T of P positions, `[T, H, U]`. `earlier` is the number of positions before these."""
    q_1HTC, k_1JPC, v_1JPU = (x.transpose(0, 1).unsqueeze(0) for x in (q_THC, k_PJC, v_PJU))
    ops = ops_for(q_THC, exact)
    return ops.causal_attention(layer, q_1HTC, k_1JPC, v_1JPU, earlier)[0].transpose(0, 1)


def _in_blocks(x_PHW: Tensor) -> Tensor:
    """Arranges positions in blocks as the cache holds them, `[M, H, 16, W]`, with the last block padded by zeros."""
    filled = F.pad(x_PHW, (0, 0, 0, 0, 0, -len(x_PHW) % BLOCK_TOKENS))
    return filled.unflatten(0, (-1, BLOCK_TOKENS)).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Bucket:
    """Sequences of similar length, which are gathered together: their rows in the batch (None: all, in order), their number, the
    index to gather their blocks with, and a mask, 0 or -inf for each gathered position."""

    rows_B: Tensor | None
    count: int
    index: Tensor
    mask_BL: Tensor


class DecodeAttention:
    """The attention of decoding (an `Attend`): one query per running sequence, to its cached positions and itself. A kernel reads
    the blocks in place; without a kernel for this case they are gathered.

    Gathering copies what attention is about to read anyway, and lets one batched product read it in order: 19 us for 64 sequences
    of 96 positions in bf16 (2 heads of 64, two Zen 5 cores), against 70 us for the product.
    """

    def __init__(
        self,
        cache: PagedCache,
        positions_B: NDArray[np.int64],
        table_BM: NDArray[np.int64],
        state_slots_B: NDArray[np.int64],
        exact: bool = False,
    ) -> None:
        self.cache, self.exact = cache, ops_for(cache.attention.keys, exact).exact
        self.positions_B, self.table_BM = positions_B, table_BM
        self.recurrence = _Recurrence(cache, [1] * len(positions_B), state_slots_B)
        self._buckets: dict[int, list[_Bucket]] = {}  # by window

    @cached_property
    def key_index(self) -> Tensor:
        blocks_B = self.table_BM[np.arange(len(self.positions_B)), self.positions_B // BLOCK_TOKENS]
        return self.cache.attention.key_index(blocks_B, self.positions_B)

    def __call__(self, layer: AttentionLayer, q_BHC: Tensor, k_BJC: Tensor, v_BJU: Tensor) -> Tensor:
        ops = ops_for(q_BHC, self.exact)
        if ops.attends_in_blocks and q_BHC.dtype == self.cache.dtype:
            rows = (torch.from_numpy(self.table_BM), torch.from_numpy(self.positions_B))
            return ops.attend_in_blocks(
                layer, q_BHC, *self.cache.attention.of_layer(layer.index), *rows, new=(k_BJC, v_BJU)
            )
        self.cache.attention.write(layer.index, self.key_index, k_BJC, v_BJU)
        return self._gathered(layer, q_BHC, v_BJU.shape[-1])

    def attend_latents(
        self, layer: AttentionLayer, q_BHC: Tensor, latents_BL: Tensor, block: LatentAttentionBlock
    ) -> Tensor:
        """Writes the latents to the cache, attends to the cached latents themselves, and returns the results, `[B, H, U]`: queries
        are projected to the latents and sums projected back, so that no key is made. Exact numerics make keys and values of all
        positions, as the learner does, which is slow."""
        self.cache.latents.write_latents(layer.index, self.key_index, latents_BL)
        if not self.exact:
            return block.from_latents(self._gathered(layer, block.to_latents(q_BHC), block.latent.kv_rank))
        rows, blocks = self.table_BM.shape
        cached_BPL, _ = self.cache.attention.gather(layer.index, self.cache.attention.gather_index(self.table_BM), rows)
        k_RHC, v_RHU = block.expanded(cached_BPL.flatten(0, 1).to(q_BHC.dtype))
        ops = ops_for(q_BHC, exact=True)
        if ops.attends_in_blocks:
            table_BM = torch.arange(rows * blocks).view(rows, blocks)
            kv = (_in_blocks(k_RHC), _in_blocks(v_RHU))
            return ops.attend_in_blocks(layer, q_BHC, *kv, table_BM, torch.from_numpy(self.positions_B))
        parts = []
        for row, position in enumerate(self.positions_B.tolist()):
            first = row * blocks * BLOCK_TOKENS
            own = slice(first, first + position + 1)
            q_1HC = q_BHC[row : row + 1]
            parts.append(_after_earlier(layer, q_1HC, k_RHC[own], v_RHU[own], position, exact=True))
        return torch.cat(parts)

    def recur(self, layer: RecurrentLayer, x_BW: Tensor, decay_BH: Tensor, beta_BH: Tensor) -> Tensor:
        """Runs one token of every sequence through a recurrent layer, and returns the outputs, `[B, H, U]`."""
        return self.recurrence(layer, x_BW, decay_BH, beta_BH, self.exact)

    def _gathered(self, layer: AttentionLayer, q_BHC: Tensor, width: int) -> Tensor:
        """Gathers the sequences' blocks, by buckets of similar length, and computes the attention to them, `[B, H, width]`."""
        if layer.window not in self._buckets:
            self._buckets[layer.window] = self._plan(layer.window)
        buckets = self._buckets[layer.window]
        if len(buckets) == 1:
            return self._attend(layer, buckets[0], q_BHC)
        out_BHU = q_BHC.new_empty(*q_BHC.shape[:2], width)
        for bucket in buckets:
            assert bucket.rows_B is not None, "only a bucket of all rows goes without their numbers"
            out_BHU.index_copy_(0, bucket.rows_B, self._attend(layer, bucket, q_BHC.index_select(0, bucket.rows_B)))
        return out_BHU

    def _plan(self, window: int) -> list[_Bucket]:
        first_B = 0 * self.positions_B
        if window and not self.exact:  # exact sums are split at the same positions of a sequence for every query
            first_B = np.maximum(self.positions_B - window + 1, 0) // BLOCK_TOKENS
        count_B = self.positions_B // BLOCK_TOKENS - first_B + 1
        if count_B.min() >= _BUCKET_SHARE * count_B.max():
            return [self._bucket(None, first_B, int(count_B.max()), self.positions_B, self.table_BM, window)]
        buckets, order = [], np.argsort(-count_B, kind="stable")
        while len(order):
            longest = int(count_B[order[0]])
            size = int((count_B[order] >= _BUCKET_SHARE * longest).sum())
            rows, order = order[:size], order[size:]
            buckets.append(
                self._bucket(rows, first_B[rows], longest, self.positions_B[rows], self.table_BM[rows], window)
            )
        return buckets

    def _bucket(
        self,
        rows: NDArray[np.int64] | None,
        first_B: NDArray[np.int64],
        longest: int,
        positions_B: NDArray[np.int64],
        table_BM: NDArray[np.int64],
        window: int,
    ) -> _Bucket:
        block_BM = first_B[:, None] + np.arange(longest)
        # After a sequence's last block any block will do: its positions are masked.
        held_BM = np.take_along_axis(table_BM, np.minimum(block_BM, positions_B[:, None] // BLOCK_TOKENS), 1)
        at_BL = (block_BM[..., None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(len(positions_B), -1)
        age_BL = positions_B[:, None] - at_BL
        hidden_BL = age_BL < 0
        if window:
            hidden_BL |= age_BL >= window
        device, dtype = self.cache.device, self.cache.dtype
        mask_BL = torch.zeros(hidden_BL.shape, device=device, dtype=dtype)
        mask_BL.masked_fill_(put(hidden_BL, device), float("-inf"))
        rows_B = None if rows is None else put(rows, device)
        return _Bucket(rows_B, len(positions_B), self.cache.attention.gather_index(held_BM), mask_BL)

    def _attend(self, layer: AttentionLayer, bucket: _Bucket, q_BHC: Tensor) -> Tensor:
        b, heads, width = q_BHC.shape
        k_NLC, v_NLU = self.cache.attention.gather(layer.index, bucket.index, b)
        length = k_NLC.shape[1]
        if self.exact:
            k_BJLC, v_BJLU = (x.unflatten(0, (b, -1)) for x in (k_NLC, v_NLU))
            seen_B11L = (bucket.mask_BL == 0)[:, None, None]
            return order_free_attention(layer, q_BHC.unsqueeze(2), k_BJLC, v_BJLU, seen_B11L).squeeze(2)
        q_NGC = q_BHC.reshape(k_NLC.shape[0], -1, width).to(k_NLC.dtype)
        scores_BHL = torch.bmm(q_NGC, k_NLC.transpose(1, 2)).mul_(layer.scale).view(b, heads, length)
        scores_BHL.add_(bucket.mask_BL.unsqueeze(1))
        if layer.sinks_H is None:
            weights_BHL = scores_BHL.softmax(-1)
        else:
            sinks_BH1 = layer.sinks_H.to(scores_BHL.dtype).view(1, -1, 1).expand(b, -1, -1)
            weights_BHL = torch.cat([scores_BHL, sinks_BH1], -1).softmax(-1)[..., :-1]
        weights_NGL = weights_BHL.reshape(k_NLC.shape[0], -1, length)
        return torch.bmm(weights_NGL, v_NLU).view(b, heads, -1).to(q_BHC.dtype)
