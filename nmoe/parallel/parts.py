"""Setting a weight from its whole value, of which ranks that shard it each keep their part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(weight: Tensor) -> TypeIs[DTensor]:
    """Whether ranks hold a part of this weight each."""
    return hasattr(weight, "device_mesh")


def keep_part(weight: Tensor, whole: Tensor) -> None:
    """Copies a whole value, which every rank has, into a weight or, if ranks shard it, this rank's part of it."""
    if is_sharded(weight):
        weight.to_local().copy_(part_of(whole, weight))
    else:
        weight.copy_(whole)


def part_of(whole: Tensor, weight: DTensor) -> Tensor:
    """This rank's part of a whole value, sharded as the weight is: a view of it, where the layout has one."""
    # Imported here because it takes 0.6 s, which only a sharded model should cost.
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if not all(type(placement) in (Shard, Replicate) for placement in weight.placements):
        # Along one axis twice, in an order of FSDP's own.
        return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
    # `distribute_tensor` would hold further copies of the whole tensor, and plans anew for each mesh: 39 ms for the first 21
    # weights of a tiny model, which take 6 this way.
    for number, placement in enumerate(weight.placements):
        if isinstance(placement, Shard):
            size, ranks = whole.shape[placement.dim], weight.device_mesh.size(number)
            each = -(-size // ranks)
            first = min(each * weight.device_mesh.get_local_rank(number), size)
            whole = whole.narrow(placement.dim, first, min(each, size - first))
    return whole


@contextmanager
def to_fill(weight: Tensor) -> Iterator[Tensor]:
    """The tensor to copy a stored weight into: the weight itself or, if ranks shard it, a whole one, of which this rank's part is
    kept afterwards."""
    if not is_sharded(weight):
        yield weight
        return
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    yield whole
    keep_part(weight, whole)
