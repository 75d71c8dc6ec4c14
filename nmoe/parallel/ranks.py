"""The ranks: the processes that train one model together, each with a shard of the weights (FSDP2).

Every rank calls the same functions in the same order. A single process is one rank, for which these functions do
nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nmoe.config.tables.model import ParallelSection
from nmoe.errors import UserError
from nmoe.parallel.axes import Axes, resolve

# FSDP and sharded tensors take 0.8 s to import, which only several ranks should cost.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

    from nmoe.parallel.dispatcher import Dispatcher


def is_sharded(weight: Tensor) -> TypeIs[DTensor]:
    """Returns whether each rank holds only a part of this weight."""
    return hasattr(weight, "device_mesh")


def keep_part(weight: Tensor, whole: Tensor) -> None:
    """Copies a full tensor, which every rank has, into a weight; if the weight is sharded, only this rank's part."""
    if is_sharded(weight):
        weight.to_local().copy_(part_of(whole, weight))
    else:
        weight.copy_(whole)


def part_of(whole: Tensor, weight: DTensor) -> Tensor:
    """Returns this rank's part of a full tensor, sharded as `weight` is; a view of the full tensor if possible."""
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
    """Yields a tensor to load a weight's stored value into.

    This is the weight itself or, if it is sharded, a temporary full tensor, from which this rank's part is copied at
    the end of the `with` block.
    """
    if not is_sharded(weight):
        yield weight
        return
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    yield whole
    keep_part(weight, whole)


R = TypeVar("R")


class Ranks:
    """The processes of torch's default process group, or only this process if there is none.

    `parallel` has the settings for dividing a model, and `axes` the resulting dimensions once a model is sharded.
    """

    def __init__(self, parallel: ParallelSection | None = None) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self.parallel = parallel or ParallelSection()
        self.axes: Axes | None = None

    @classmethod
    def alone(cls) -> Ranks:
        """Returns an object for this process alone, even if there are other ranks."""
        ranks = cls()
        ranks.size, ranks.rank = 1, 0
        return ranks

    @property
    def per_node(self) -> int:
        """The number of ranks on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) if self.size > 1 else 1

    def share(self, model: nn.Module) -> bool:
        """Returns whether this model is sharded over the ranks."""
        if self.size == 1:
            return False
        from torch.distributed.fsdp import FSDPModule

        return isinstance(model, FSDPModule)

    def shard(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        experts: Sequence[nn.Module] = (),
        number: int = 0,
        kept: Collection[nn.Parameter] = (),
        device: torch.device | None = None,
    ) -> Dispatcher | None:
        """Shards a model over the ranks: block by block, then all parameters outside of blocks together.

        The modules `experts` have the weights of `number` experts each, which the ranks of an expert group divide; the
        returned dispatcher then sends rows to them (None without expert parallelism). The parameters in `kept` are not
        sharded. `device` is the future device of a model on the meta device. Raises UserError as `resolve` does.
        """
        self.axes = axes_here(self.parallel, self.size, self.per_node, number)
        where = (device or next(model.parameters()).device).type
        offload = offloads(self.parallel, self.size, where)
        if self.size == 1:
            return None
        from nmoe.parallel.mesh import make_meshes, shard_model

        meshes = make_meshes(self.axes, where)
        shard_model(model, blocks, experts, kept, meshes, offload)
        return meshes.dispatcher

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over all ranks, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sums the gradients of unsharded parameters over all ranks, in place. A missing gradient counts as zero.

        Gradients of the same dtype are sent together.
        """
        if self.size == 1:
            return
        of_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if not is_sharded(parameter):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                of_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
        for gradients in of_dtype.values():
            flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def gather(self, value: R) -> list[R]:
        """Returns the values of all ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Waits until every rank has called this method."""
        if self.size > 1:
            dist.barrier()


def axes_here(parallel: ParallelSection, world: int, per_node: int, experts: int) -> Axes:
    """Determines the parallel dimensions as `resolve` does, but without expert parallelism if "auto" may decide and
    torch is too old for it."""
    if world > 1 and parallel.ep == "auto" and parallel.rdep == "auto":
        from nmoe.parallel.mesh import has_meshes_by_parameter

        if not has_meshes_by_parameter():
            parallel = parallel.model_copy(update={"ep": 1})
    return resolve(parallel, world, per_node, experts)


def offloads(parallel: ParallelSection, world: int, device: str) -> bool:
    """Returns whether shards are kept in the machine's memory instead of the GPU's.

    Raises UserError if this is configured for a model on a CPU or for a single process.
    """
    if parallel.offload != "cpu":
        return False
    if device == "cpu":
        raise UserError(
            'parallel.offload = "cpu": the model is on a CPU, which has no separate memory to save; set it to "none" or "auto"'
        )
    if world == 1:
        raise UserError(
            'parallel.offload = "cpu": one process shards nothing; start two ranks or more, or set it to "none"'
        )
    return True


def release(model: nn.Module) -> None:
    """Frees gathered weights that a forward pass without a backward pass has left, so that the next pass gathers the
    current ones."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Returns the full value of a sharded tensor, on every rank."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, which shares the tensor's memory.

    Elementwise operations use it, because operations on sharded tensors are planned anew for each mesh, at a tenth of a
    second each.
    """
    return tensor.to_local() if is_sharded(tensor) else tensor


def own_part(parameter: Tensor) -> Tensor:
    """Returns the tensor that this rank's optimizer updates: its part of a sharded parameter, or the parameter itself."""
    return local(parameter.detach()).requires_grad_() if is_sharded(parameter) else parameter


def sharded_as(part: Tensor, parameter: Tensor) -> Tensor:
    """Makes a sharded tensor from each rank's part, with the sharding of `parameter`.

    Returns `part` unchanged if the parameter is not sharded or has another shape than the part, which may be a step
    count.
    """
    if is_sharded(parameter) and part.shape == parameter.to_local().shape:
        from torch.distributed.tensor import DTensor

        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    return part


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Shards a full tensor, which every rank has, as `parameter` is sharded, and returns it with a copy of this rank's part.

    Returns the tensor unchanged if the parameter is not sharded or has another shape than the tensor, which may be a
    step count.
    """
    if is_sharded(parameter) and tensor.shape == parameter.shape:
        return sharded_as(part_of(tensor, parameter).clone(memory_format=torch.contiguous_format), parameter)
    return tensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by the mesh that they are sharded over, because one operation may only take tensors of the same mesh."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_sharded(tensor) else None, []).append(tensor)
    return list(groups.values())


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm of all gradients together, over all ranks."""
    if not any(is_sharded(gradient) for gradient in gradients):
        return nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    # One sum over the ranks for all meshes, so that all ranks get the same bits.
    shared, own = torch.zeros(2, dtype=torch.float64, device=gradients[0].device)
    for group in by_mesh(gradients):
        square = nn.utils.get_total_norm([local(gradient) for gradient in group]).double().square()
        if is_sharded(first := group[0]):
            shared += square / _copies(first)
        else:
            own += square
    dist.all_reduce(shared)
    return (shared + own).sqrt().to(gradients[0].dtype)


def _copies(tensor: DTensor) -> int:
    """Returns the number of ranks that hold the same part of a tensor."""
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def clip(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales the gradients of the parameters down to the norm `max_norm` if their current norm, `norm`, is larger."""
    held = [local(parameter.detach()) for parameter in parameters]
    for mine, parameter in zip(held, parameters, strict=True):
        mine.grad = None if parameter.grad is None else local(parameter.grad)
    nn.utils.clip_grads_with_norm_(held, max_norm, norm)
