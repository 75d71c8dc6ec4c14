"""Causal attention within packed sequences, on any device, with no mask that is quadratic in the pack.

On CUDA in bf16 and fp16, layers without sinks use torch's variable-length kernel (`nmoe.model.varlen`), which supports neither
CPUs nor fp32 nor sinks. Elsewhere sequences are sorted by length, longest first, and grouped into length buckets, each padded
at the end to its longest member. A causal kernel needs no mask there, because a real token never sees padding.
"""

# Shapes: T packed tokens, S distinct ones among them, N heads, H query heads, J key-value heads, C head width, U value width; a
# bucket has B sequences of length at most L.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nmoe.model import exact_attention, recurrence
from nmoe.model.ops.attention import AttentionLayer, Clusters
from nmoe.model.ops.gradients import AttentionInClusters
from nmoe.model.ops.table import ops_for
from nmoe.model.recurrence import RecurrentLayer, Spans
from nmoe.model.varlen import VarlenAttention

# A bucket ends at the first sequence shorter than this share of the bucket's longest. A lower share wastes arithmetic on
# padding, a higher one launches more kernels.
_BUCKET_SHARE = 0.8

# Devices with a variable-length kernel.
_VARLEN_DEVICES = ("cuda",)


@dataclass
class _Bucket:
    """A run of sequences of similar length: its span of tokens, and their places in the padded block (None: no padding)."""

    start: int
    lengths: list[int]

    def __post_init__(self) -> None:
        self.longest = self.lengths[0]
        self.stop = self.start + sum(self.lengths)
        self.rows_T: Tensor | None = None
        if self.lengths[-1] != self.longest:
            firsts = range(0, len(self.lengths) * self.longest, self.longest)
            spans = [torch.arange(first, first + n) for first, n in zip(firsts, self.lengths, strict=True)]
            self.rows_T = torch.cat(spans)

    def block(self, x_TNC: Tensor) -> Tensor:
        """The bucket's rows of a packed tensor as `[B, N, L, C]`."""
        part_TNC = x_TNC[self.start : self.stop]
        if self.rows_T is not None:
            padded_TNC = part_TNC.new_zeros(len(self.lengths) * self.longest, *part_TNC.shape[1:])
            part_TNC = padded_TNC.index_copy(0, self.rows_T, part_TNC)
        return part_TNC.reshape(len(self.lengths), self.longest, *part_TNC.shape[1:]).transpose(1, 2)


class PackedAttention:
    """An `Attend` over sequences laid end to end; `lengths` gives their lengths in that order. `exact` attends by
    `nmoe.model.exact_attention`.

    Sequences may share rows, such as a common prompt: then `shared` gives the rows, of all T, that it is called with (`[S]`),
    and the place of each of the T among them (`[T]`).
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        exact: bool = False,
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.lengths, self.device, self.exact, self.shared = lengths, device, exact, shared
        self.varlen = VarlenAttention(lengths, device, shared) if device.type in _VARLEN_DEVICES and not exact else None

    @cached_property
    def bucketed(self) -> _BucketedAttention:
        """Built when a layer first needs it."""
        return _BucketedAttention(self.lengths, self.device, self.shared, exact=False)

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        if ops_for(q_THC, self.exact).exact:
            return self._exact(layer, q_THC, k_TJC, v_TJU)
        if self.varlen is not None and self.varlen.takes(layer, q_THC):
            return self.varlen(layer, q_THC, k_TJC, v_TJU)
        ops = ops_for(q_THC)
        if not ops.takes_clusters(layer, q_THC, k_TJC, v_TJU, max(self.lengths, default=0)):
            return self.bucketed(layer, q_THC, k_TJC, v_TJU)
        out_THU: Tensor = AttentionInClusters.apply(ops, layer, self.clusters, q_THC, k_TJC, v_TJU)
        return out_THU

    @cached_property
    def clusters(self) -> Clusters:
        """Built when a layer first needs it."""
        return clusters_of(self.lengths, self.shared)

    def _exact(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        if self.shared is None:
            return self.in_order(layer, q_THC, k_TJC, v_TJU)
        rows_S, place_T = self.shared
        out_THU = self.in_order(layer, *(x.index_select(0, place_T) for x in (q_THC, k_TJC, v_TJU)))
        return out_THU.index_select(0, rows_S)

    def recur(self, layer: RecurrentLayer, x_TW: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
        """Runs a recurrent layer from the start of every sequence. Rows that sequences share are run for each."""
        if self.shared is None:
            return recurrence.run(layer, self.spans, x_TW, decay_TH, beta_TH, None, self.exact)[0]
        rows_S, place_T = self.shared
        x_TW, decay_TH, beta_TH = (x.index_select(0, place_T) for x in (x_TW, decay_TH, beta_TH))
        return recurrence.run(layer, self.spans, x_TW, decay_TH, beta_TH, None, self.exact)[0].index_select(0, rows_S)

    @cached_property
    def spans(self) -> Spans:
        """Built when a recurrent layer first needs it."""
        return Spans(self.lengths, self.device)

    @cached_property
    def in_order(self) -> exact_attention.ExactAttention:
        without_order, plain = (
            _BucketedAttention(self.lengths, self.device, shared=None, exact=exact) for exact in (True, False)
        )
        return exact_attention.ExactAttention(self.lengths, without_order, plain)


def clusters_of(lengths: Sequence[int], shared: tuple[Tensor, Tensor] | None) -> Clusters:
    """The clusters of sequences whose leading rows may be shared, as `PackedAttention` is given them."""
    tokens = sum(lengths)
    places_T = np.arange(tokens) if shared is None else shared[1].numpy()
    own_T = np.ones(tokens, bool) if shared is None else shared[0].numpy()[places_T] == np.arange(tokens)
    spans: dict[int, list[tuple[int, int, int]]] = {}  # by the row that a cluster begins with
    start = 0
    for length in lengths:
        places, own = places_T[start : start + length], int(own_T[start : start + length].sum())
        if own:
            prefix = length - own
            first = int(places[prefix])
            row = int(places[0]) if prefix else first
            expected = np.concatenate([np.arange(row, row + prefix), np.arange(first, first + own)])
            assert np.array_equal(places, expected), "what sequences share is the beginning of the first of them"
            spans.setdefault(row, []).append((prefix, first, own))
        start += length
    bounds = [0, *accumulate(len(cluster) for cluster in spans.values())]
    rows = [span for cluster in spans.values() for span in cluster]
    return Clusters(torch.tensor(rows, dtype=torch.int64), torch.tensor(bounds), max(lengths, default=0))


class _BucketedAttention:
    """An `Attend` bucket by bucket."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        shared: tuple[Tensor, Tensor] | None,
        exact: bool,
    ) -> None:
        self.exact = exact
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        self.gather_T: Tensor | None = None
        if order != list(range(len(lengths))):
            starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
            self.gather_T = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order]).to(device)
            self.back_S = self.gather_T.argsort()
        if shared is not None:
            rows_S, place_T = shared
            self.back_S = rows_S if self.gather_T is None else self.back_S[rows_S]
            self.gather_T = place_T if self.gather_T is None else place_T[self.gather_T]
        self.buckets: list[_Bucket] = []
        run: list[int] = []
        for length in [lengths[i] for i in order if lengths[i]] + [0]:
            if run and length < _BUCKET_SHARE * run[0]:
                start = self.buckets[-1].stop if self.buckets else 0
                self.buckets.append(_Bucket(start, run))
                run = []
            run.append(length)
        for bucket in self.buckets:
            bucket.rows_T = None if bucket.rows_T is None else bucket.rows_T.to(device)

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        if self.gather_T is not None:
            q_THC, k_TJC, v_TJU = (x.index_select(0, self.gather_T) for x in (q_THC, k_TJC, v_TJU))
        parts, ops = [], ops_for(q_THC, self.exact)
        for bucket in self.buckets:
            o_BHLU = ops.causal_attention(layer, bucket.block(q_THC), bucket.block(k_TJC), bucket.block(v_TJU))
            o_THU = o_BHLU.transpose(1, 2).reshape(-1, o_BHLU.shape[1], o_BHLU.shape[3])
            parts.append(o_THU if bucket.rows_T is None else o_THU.index_select(0, bucket.rows_T))
        out_THU = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_THU if self.gather_T is None else out_THU.index_select(0, self.back_S)
