"""Causal attention within packed sequences, on any device, with no mask that is quadratic in the pack.

On CUDA in bf16 and fp16, layers without sinks use torch's variable-length kernel, which supports neither CPUs nor fp32 nor sinks.
Elsewhere sequences are sorted by length, longest first, and grouped into length buckets, each padded at the end to its longest
member. A causal kernel needs no mask there, because a real token never sees padding.

Exact numerics give a query the same bits in any batch: in training, in prefill and in decoding. They use the kernel of decoding,
which takes a query's keys in order, in blocks that start at position 0. Where the kernel cannot run, they use sums that no order
changes (`nmoe.model.ops.exact.order_free`).
"""

# Shapes: T packed tokens, S distinct ones among them (in exact numerics: sequences), M blocks of the longest, N heads, H query
# heads, J key-value heads, C head width, U value width; a bucket has B sequences of length at most L.

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model import recurrence
from nmoe.model.layers import Attend
from nmoe.model.ops.attention import AttentionLayer, Clusters
from nmoe.model.ops.table import ops_for
from nmoe.model.recurrence import RecurrentLayer, Spans

# The kernel needs head widths that are multiples of the first, at most the second, and the same for keys and values.
_WIDTH_STEP, _WIDEST = 8, 256


class VarlenAttention:
    """An `Attend` by torch's variable-length kernel over sequences laid end to end, with these `lengths`. If sequences share rows,
    such as a common prompt, `shared` holds for each row given the position in the packed tokens that it computes (`[S]`), and for
    each packed token the index of its row (`[T]`)."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, shared: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.shared = shared
        # Imported here because it loads torch's compiler, which costs a second of start-up that no CPU run needs.
        from torch.nn.attention import varlen

        present = [length for length in lengths if length]
        self.longest = max(present, default=0)
        self.bounds_B = torch.tensor([0, *present]).cumsum(0).to(device, torch.int32)
        self.kernel: Any = varlen.varlen_attn  # its signature differs between versions
        # torch 2.11 always takes fewer key-value heads; later versions have an argument for it.
        self.says_gqa = "enable_gqa" in inspect.signature(self.kernel).parameters

    def takes(self, layer: AttentionLayer, q_THC: Tensor) -> bool:
        """Returns whether the kernel computes this layer, gradients included. A sink could be added by the log of the softmax's
        sum, which the kernel returns, but no gradient passes through that."""
        return q_THC.dtype in (torch.bfloat16, torch.float16) and q_THC.shape[-1] <= _WIDEST and layer.sinks_H is None

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        if self.shared is not None:
            q_THC, k_TJC, v_TJU = (x.index_select(0, self.shared[1]) for x in (q_THC, k_TJC, v_TJU))
        width, value_width = q_THC.shape[-1], v_TJU.shape[-1]
        assert value_width <= width, "values are padded to the keys' width"
        padded = -(-width // _WIDTH_STEP) * _WIDTH_STEP
        q_THC, k_TJC, v_TJU = (
            x if x.shape[-1] == padded else F.pad(x, (0, padded - x.shape[-1])) for x in (q_THC, k_TJC, v_TJU)
        )
        gqa = q_THC.shape[1] != k_TJC.shape[1]
        o_THU: Tensor = self.kernel(
            q_THC,
            k_TJC,
            v_TJU,
            self.bounds_B,
            self.bounds_B,
            self.longest,
            self.longest,
            scale=layer.scale,
            # The numbers of visible keys before and after the query's own; (-1, 0) is causal without a window.
            window_size=(layer.window - 1, 0) if 0 < layer.window < self.longest else (-1, 0),
            **({"enable_gqa": True} if gqa and self.says_gqa else {}),
        )
        o_THU = o_THU if padded == value_width else o_THU[..., :value_width]
        return o_THU if self.shared is None else o_THU.index_select(0, self.shared[0])


_BLOCK = 16  # positions, of attention.cpp


class ExactAttention:
    """An `Attend` with exact numerics over sequences laid end to end, with these `lengths`. `order_free` is used where the decoding
    kernel cannot run. Gradients come from `differentiable`, the same attention by torch's operations; their bits may depend on the
    batch."""

    def __init__(self, lengths: Sequence[int], order_free: Attend, differentiable: Attend) -> None:
        self.order_free, self.differentiable = order_free, differentiable
        lengths_S = torch.tensor(lengths, dtype=torch.int64)
        blocks_S = (lengths_S + _BLOCK - 1).div(_BLOCK, rounding_mode="floor")
        first_S = blocks_S.cumsum(0) - blocks_S
        self.blocks = int(blocks_S.sum())
        self.sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_S)
        self.positions_T = torch.arange(len(self.sequence_T)) - (lengths_S.cumsum(0) - lengths_S)[self.sequence_T]
        self.index_T = first_S[self.sequence_T] * _BLOCK + self.positions_T
        # Entries past a sequence's blocks are never read.
        self.table_SM = first_S.unsqueeze(1) + torch.arange(max(blocks_S.tolist(), default=0))

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.attend(layer, q_THC, k_TJC, v_TJU)
        out_THU: Tensor = _Exact.apply(q_THC, k_TJC, v_TJU, layer.sinks_H, layer, self)
        return out_THU

    def attend(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        ops = ops_for(q_THC, exact=True)
        if not ops.attends_in_blocks:
            return self.order_free(layer, q_THC, k_TJC, v_TJU)
        return ops.attend_in_blocks(
            layer,
            q_THC,
            self._in_blocks(k_TJC),
            self._in_blocks(v_TJU),
            self.table_SM,
            self.positions_T,
            self.sequence_T,
        )

    def _in_blocks(self, x_TJW: Tensor) -> Tensor:
        """Lays keys or values out in a cache's blocks of 16 tokens, `[blocks, key-value heads, 16, width]`."""
        rows = x_TJW.new_zeros(self.blocks * _BLOCK, *x_TJW.shape[1:]).index_copy_(0, self.index_T, x_TJW)
        return rows.unflatten(0, (self.blocks, _BLOCK)).transpose(1, 2).contiguous()


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THC: Tensor,
        k_TJC: Tensor,
        v_TJU: Tensor,
        sinks_H: Tensor | None,
        layer: AttentionLayer,
        attention: ExactAttention,
    ) -> Tensor:
        ctx.save_for_backward(q_THC, k_TJC, v_TJU, sinks_H)
        ctx.layer, ctx.attention = layer, attention
        return attention.attend(layer, q_THC, k_TJC, v_TJU)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
            q_THC, k_TJC, v_TJU, sinks_H = inputs
            out_THU = ctx.attention.differentiable(replace(ctx.layer, sinks_H=sinks_H), q_THC, k_TJC, v_TJU)
            found = torch.autograd.grad(out_THU, [x for x in inputs if x is not None], grads[0])
        return *found, *([None] * (6 - len(found)))


# A bucket ends at the first sequence shorter than this share of the bucket's longest. A lower share wastes arithmetic on
# padding, a higher one launches more kernels.
_BUCKET_SHARE = 0.8

# Devices with a variable-length kernel.
_VARLEN_DEVICES = ("cuda",)


@dataclass
class _Bucket:
    """Sequences of similar length, longest first: their tokens are those from `start` to `stop`, and `rows_T` holds the index of
    each token in the padded block (None: all have the same length)."""

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
        """Gathers this bucket's sequences (of similar length) from a packed tensor, padded to `[sequences, heads, length,
        channels]`."""
        part_TNC = x_TNC[self.start : self.stop]
        if self.rows_T is not None:
            padded_TNC = part_TNC.new_zeros(len(self.lengths) * self.longest, *part_TNC.shape[1:])
            part_TNC = padded_TNC.index_copy(0, self.rows_T, part_TNC)
        return part_TNC.reshape(len(self.lengths), self.longest, *part_TNC.shape[1:]).transpose(1, 2)


class PackedAttention:
    """An `Attend` over sequences laid end to end, with these `lengths`, that chooses the fastest method for each layer. `exact`
    asks for exact numerics.

    If sequences share rows, such as a common prompt, `shared` holds for each row given the position in the packed tokens that it
    computes (`[S]`), and for each packed token the index of its row (`[T]`).
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
        """Attention by length buckets, built when a layer first needs it."""
        return _BucketedAttention(self.lengths, self.device, self.shared, exact=False)

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        if ops_for(q_THC, self.exact).exact:
            return self._exact(layer, q_THC, k_TJC, v_TJU)
        if self.varlen is not None and self.varlen.takes(layer, q_THC):
            return self.varlen(layer, q_THC, k_TJC, v_TJU)
        ops = ops_for(q_THC)
        if not ops.takes_clusters(layer, q_THC, k_TJC, v_TJU, max(self.lengths, default=0)):
            return self.bucketed(layer, q_THC, k_TJC, v_TJU)
        return ops.attend_in_clusters(layer, q_THC, k_TJC, v_TJU, self.clusters)

    @cached_property
    def clusters(self) -> Clusters:
        """The groups of sequences that share leading rows, built when a layer first needs them."""
        return clusters_of(self.lengths, self.shared)

    def _exact(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        if self.shared is None:
            return self.in_order(layer, q_THC, k_TJC, v_TJU)
        rows_S, index_T = self.shared
        out_THU = self.in_order(layer, *(x.index_select(0, index_T) for x in (q_THC, k_TJC, v_TJU)))
        return out_THU.index_select(0, rows_S)

    def recur(self, layer: RecurrentLayer, x_TW: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
        """Runs a recurrent layer from the start of every sequence. Rows that sequences share are computed again for each
        sequence."""
        if self.shared is None:
            return recurrence.run(layer, self.spans, x_TW, decay_TH, beta_TH, None, self.exact)[0]
        rows_S, index_T = self.shared
        x_TW, decay_TH, beta_TH = (x.index_select(0, index_T) for x in (x_TW, decay_TH, beta_TH))
        return recurrence.run(layer, self.spans, x_TW, decay_TH, beta_TH, None, self.exact)[0].index_select(0, rows_S)

    @cached_property
    def spans(self) -> Spans:
        """The sequences' positions in the pack for recurrent layers, built when such a layer first needs them."""
        return Spans(self.lengths, self.device)

    @cached_property
    def in_order(self) -> ExactAttention:
        without_order, plain = (
            _BucketedAttention(self.lengths, self.device, shared=None, exact=exact) for exact in (True, False)
        )
        return ExactAttention(self.lengths, without_order, plain)


def clusters_of(lengths: Sequence[int], shared: tuple[Tensor, Tensor] | None) -> Clusters:
    """Groups sequences that share leading rows, such as a common prompt, into clusters. `shared` is as in `PackedAttention`."""
    tokens = sum(lengths)
    index_T = np.arange(tokens) if shared is None else shared[1].numpy()
    own_T = np.ones(tokens, bool) if shared is None else shared[0].numpy()[index_T] == np.arange(tokens)
    spans: dict[int, list[tuple[int, int, int]]] = {}  # by the row that a cluster begins with
    start = 0
    for length in lengths:
        index, own = index_T[start : start + length], int(own_T[start : start + length].sum())
        if own:
            prefix = length - own
            first = int(index[prefix])
            row = int(index[0]) if prefix else first
            expected = np.concatenate([np.arange(row, row + prefix), np.arange(first, first + own)])
            assert np.array_equal(index, expected), "what sequences share is the beginning of the first of them"
            spans.setdefault(row, []).append((prefix, first, own))
        start += length
    bounds = [0, *accumulate(len(cluster) for cluster in spans.values())]
    rows = [span for cluster in spans.values() for span in cluster]
    return Clusters(torch.tensor(rows, dtype=torch.int64), torch.tensor(bounds), max(lengths, default=0))


class _BucketedAttention:
    """An `Attend` that runs one kernel for each bucket of sequences of similar length."""

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
            rows_S, index_T = shared
            self.back_S = rows_S if self.gather_T is None else self.back_S[rows_S]
            self.gather_T = index_T if self.gather_T is None else index_T[self.gather_T]
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
