"""Expert parallelism (RDEP): sends each routed row to the rank that has its expert, and sends the result back.

A group of `ep` ranks shares a layer's experts; rank i has the i-th part. Every rank sends each of its rows to the rank
of the row's expert, so that no row is dropped, even if experts have unequal loads. The collective form is one
all-to-all over the group. If the group spans several nodes, rows travel in two hops: first to the rank with the same
index in the expert's node, then within that node. So each rank has one partner in every other node, to which it sends
all of its rows for that node at once.
"""

# Shapes: R rows of this rank, S rows of its experts, D width, E experts, e experts of one rank, B blocks of rows.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nmoe.parallel.traffic import Meter, Traffic

# What gloo and nccl both carry. It is all that gloo takes: others end in "Invalid scalar type".
_CARRIED = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)


def exchange(
    rows_RD: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Exchanges rows between the ranks of a group (all-to-all); returns the received rows, `[S, D]`, in the order of
    their ranks.

    The first `send[0]` rows go to the group's first rank, the next `send[1]` to its second, and so on; `receive[i]`
    rows come from rank i. All ranks of the group, by default all ranks, have to call this. A dtype that the group's
    backend does not support, such as int16 or fp8, is sent as bytes.
    """
    rows_SD = rows_RD.new_empty((sum(receive), *rows_RD.shape[1:]))
    parts = list(receive), list(send)
    if rows_RD.dtype in _CARRIED:
        dist.all_to_all_single(rows_SD, rows_RD.contiguous(), *parts, group=group)
    else:
        sent, came = (x.view(x.shape[0], -1).view(torch.uint8) for x in (rows_RD.contiguous(), rows_SD))
        dist.all_to_all_single(came, sent, *parts, group=group)
    return rows_SD


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup, meter: Meter
    ) -> Tensor:
        ctx.back = receive, send, group, meter
        with meter.exchange(send, group.rank(), rows_RD.shape[1] * rows_RD.element_size()):
            return exchange(rows_RD, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grad_SD, *ctx.back), None, None, None, None


def differentiable_exchange(
    rows_RD: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup, meter: Meter
) -> Tensor:
    """Exchanges rows as `exchange` does, with a gradient, which is sent back the same way. `meter` measures both directions."""
    rows_SD: Tensor = _Exchange.apply(rows_RD, send, receive, group, meter)
    return rows_SD


@dataclass(frozen=True)
class Hop:
    """One exchange of a dispatch, for its way back.

    index_R: the order in which the rows were sent, as indices; None if it was not changed.
    send: the number of rows sent to each rank of the group.
    receive: the number of rows received from each.
    """

    index_R: Tensor | None
    send: list[int]
    receive: list[int]


@dataclass(frozen=True)
class Handle:
    """The route of dispatched rows, with which `combine` sends the results back: the hops, and the order of the rows
    after them."""

    hops: list[Hop]
    index_S: Tensor


class Dispatcher:
    """Sends rows to the ranks of their experts (dispatch) and results back (combine); the backward pass of each is the other.

    `groups` are the process groups of the hops; if there are two, the first one is between nodes. `rank` is this
    process's index in the expert group; indices count up along the last group first.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], rank: int) -> None:
        self.groups = tuple(groups)
        self.sizes = tuple(group.size() for group in groups)
        self.ep, self.rank = torch.Size(self.sizes).numel(), rank
        self._meter = Meter()

    def own(self, weight_E: Tensor) -> Tensor:
        """Returns this rank's experts of a weight that stacks a layer's experts: the local shard, or a slice of an
        unsharded weight."""
        if isinstance(weight_E, DTensor):
            return weight_E.to_local()
        each = weight_E.shape[0] // self.ep
        return weight_E[self.rank * each : (self.rank + 1) * each]

    def sent(self) -> Traffic:
        """Returns the bytes that this rank has sent to others, forward and backward, and the seconds that this took, since
        `sent` was last called."""
        return self._meter.taken()

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Handle]:
        """Sends rows, which are sorted by expert, to the ranks that have these experts.

        `counts_E` is the number of rows of each expert. Returns the received rows, sorted by this rank's experts and
        then by the rank that sent them; the number of rows of each of this rank's experts; and a handle for `combine`.
        """
        # The counts of the blocks that the rows lie in: one axis for each hop, which names the rank that the block goes to and,
        # after the hop, the one it came from; the last axis counts a rank's experts.
        counts = counts_E.view(*self.sizes, -1)
        axes = list(range(counts.dim()))
        lie = axes  # the order of the axes in which the blocks lie
        hops = []
        for axis, group in enumerate(self.groups):
            wanted = [axis, *(other for other in axes if other != axis)]
            index_R = None if wanted == lie else regrouped(counts, lie, wanted)
            rows_RD = rows_RD if index_R is None else rows_RD.index_select(0, index_R)
            sent = counts.permute(wanted).contiguous()
            even = [1] * sent.shape[0]
            came = exchange(sent.flatten(1), even, even, group).view_as(sent)
            send, receive = torch.stack([sent.flatten(1).sum(1), came.flatten(1).sum(1)]).tolist()
            rows_RD = differentiable_exchange(rows_RD, send, receive, group, self._meter)
            hops.append(Hop(index_R, send, receive))
            counts, lie = came.permute([wanted.index(a) for a in axes]), wanted
        index_S = regrouped(counts, lie, [axes[-1], *axes[:-1]])
        return rows_RD.index_select(0, index_S), counts.flatten(0, -2).sum(0), Handle(hops, index_S)

    def combine(self, rows_SD: Tensor, handle: Handle) -> Tensor:
        """Sends the results of dispatched rows back; returns them in the order of the rows given to `dispatch`, `[R, D]`."""
        rows_SD = rows_SD.index_select(0, _inverse(handle.index_S))
        for hop, group in zip(reversed(handle.hops), reversed(self.groups), strict=True):
            rows_SD = differentiable_exchange(rows_SD, hop.receive, hop.send, group, self._meter)
            if hop.index_R is not None:
                rows_SD = rows_SD.index_select(0, _inverse(hop.index_R))
        return rows_SD


class HeldDispatcher(Dispatcher):
    """A dispatcher for a model of which each rank holds only its own experts, as plain tensors."""

    def own(self, weight_E: Tensor) -> Tensor:
        return weight_E


def regrouped(counts: Tensor, lie: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Returns the indices, `[R]`, that reorder blocks of rows from one order of axes to another.

    `counts` is an array with the number of rows of each block. The blocks are stored with the axes of this array in the
    order `lie`, and `wanted` is the new order. For two axes, `counts = [[1, 2], [1, 0]]`, from order (0, 1) to (1, 0):
    the blocks of 1, 2, 1, 0 rows become 1, 1, 2, 0, so the indices are [0, 3, 1, 2].
    """
    counts_B = counts.permute(*lie).reshape(-1)
    starts = (counts_B.cumsum(0) - counts_B).view([counts.shape[axis] for axis in lie])
    starts_B = starts.permute([lie.index(axis) for axis in wanted]).reshape(-1)
    counts_B = counts.permute(*wanted).reshape(-1)
    shift_B = starts_B - (counts_B.cumsum(0) - counts_B)
    shift_R = shift_B.repeat_interleave(counts_B)
    return shift_R + torch.arange(shift_R.shape[0], device=counts.device)


def _inverse(index_R: Tensor) -> Tensor:
    """Returns the inverse of a permutation."""
    return torch.empty_like(index_R).scatter_(0, index_R, torch.arange(index_R.shape[0], device=index_R.device))
