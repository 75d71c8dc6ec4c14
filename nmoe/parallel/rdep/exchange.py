"""The exchange of rows between the ranks of a group, differentiable, for every dtype."""

# Shapes: R rows that this rank sends, S rows that it receives, D width.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe.parallel.traffic import Meter

# What gloo and nccl both carry. It is all that gloo takes: others end in "Invalid scalar type".
_CARRIED = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)


def exchange(
    rows_RD: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Sends the first `send[0]` rows to the group's first rank, the next `send[1]` to its second, and so on, and returns the rows
    that came, `[S, D]`, by rank. `receive[i]` rows come from rank i. All ranks of the group, by default of the world, call
    this.

    A dtype that the group's backend does not carry, such as int16 or fp8, travels as bytes.
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
    """`exchange` with a gradient: that of the rows that were sent travels back the same way. The meter counts both."""
    rows_SD: Tensor = _Exchange.apply(rows_RD, send, receive, group, meter)
    return rows_SD
