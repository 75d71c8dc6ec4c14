"""Ranks: the processes that train one model together. Its weights are sharded over them (FSDP2), and their results are joined.

Every rank calls the same functions in the same order. A single process is one rank, for which they do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

R = TypeVar("R")


class Ranks:
    """All processes of the default group of `torch.distributed`, or only this one if there is no group."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0

    def shard(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Shards the parameters over the ranks, block by block, and the parameters outside of blocks together (Zhao et al. 2023,
        arXiv:2304.11277). The weights of a block are gathered while it runs."""
        if self.size > 1:
            for block in blocks:
                fully_shard(block)
            fully_shard(model)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: R) -> list[R]:
        """Returns every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Waits until every rank has called this."""
        if self.size > 1:
            dist.barrier()


def release(model: nn.Module) -> None:
    """Frees gathered weights that a forward pass without a backward pass left behind, so that the next pass gathers the new
    ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full value of a sharded tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Shards a full tensor as the parameter is. A tensor of another shape, such as a step count, is returned as it is."""
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict with every tensor whole, on every rank."""
    release(model)
    state = get_model_state_dict(model)
    return {name: whole(tensor) for name, tensor in state.items() if isinstance(tensor, Tensor)}


def set_full_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state dict of whole tensors, of which each rank keeps its part. Every rank passes the same."""
    release(model)
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all gradients and all ranks."""
    return whole(nn.utils.get_total_norm(gradients)) if gradients else torch.zeros(())
