"""Setting a weight from its whole value, of which ranks that shard it each keep their part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def is_sharded(weight: Tensor) -> bool:
    """Whether ranks hold a part of this weight each."""
    return hasattr(weight, "device_mesh")


def keep_part(weight: Tensor, whole: Tensor) -> None:
    """Copies a whole value, which every rank has, into a weight or, if ranks shard it, this rank's part of it."""
    if not is_sharded(weight):
        weight.copy_(whole)
        return
    # Imported here because it takes 0.6 s, which only a sharded model should cost.
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    assert isinstance(weight, DTensor), "what shards a tensor"
    if not all(type(placement) in (Shard, Replicate) for placement in weight.placements):
        # Along one axis twice, in an order of FSDP's own.
        weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None))
        return
    # A view, where `distribute_tensor` would hold further copies of the whole tensor.
    for number, placement in enumerate(weight.placements):
        if isinstance(placement, Shard):
            size, ranks = whole.shape[placement.dim], weight.device_mesh.size(number)
            each = -(-size // ranks)
            first = min(each * weight.device_mesh.get_local_rank(number), size)
            whole = whole.narrow(placement.dim, first, min(each, size - first))
    weight.to_local().copy_(whole)


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
