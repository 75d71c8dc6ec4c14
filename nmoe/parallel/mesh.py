"""Shards a model over a mesh of ranks: dense weights over all ranks of a replica, experts first over the ranks of an
expert group.

The mesh has the axes `dp_replicate`, `efsdp` and `ep`; the last one is innermost. FSDP2 (Zhao et al. 2023,
arXiv:2304.11277) gathers the weights of a block while it runs: dense weights in groups of `efsdp x ep` ranks, and
experts in groups of `efsdp` ranks, because along `ep` they stay on their ranks. Gradients are sums over all ranks, not
means.

A separate mesh for a parameter needs names of FSDP2 that torch keeps private; it has had them since 2.12, and
torchtitan imports the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from nmoe.errors import UserError
from nmoe.parallel.axes import Axes, expert_axis
from nmoe.parallel.dispatcher import Dispatcher

Placement = Callable[[nn.Parameter], Any]
"""A function that FSDP2's `fully_shard` takes as `shard_placement_fn`: it decides how a parameter is sharded."""


def has_meshes_by_parameter() -> bool:
    """Returns whether this version of torch can shard each parameter over a different mesh, which expert parallelism needs."""
    return hasattr(_fsdp_common, "ShardPlacementResult")


def on_meshes(axis: Callable[[nn.Parameter], int], mesh: Callable[[nn.Parameter], DeviceMesh]) -> Placement:
    """Returns a placement function for FSDP2 that shards each parameter along the axis, and over the mesh, that these
    functions give.

    A mesh has one axis, or two with the axis of replicas first. Raises UserError if torch is too old.
    """
    if not has_meshes_by_parameter():
        raise UserError(
            f"torch {torch.__version__}: expert parallelism needs torch 2.12 or later; upgrade it or set parallel.ep = 1"
        )
    groups: dict[DeviceMesh, Any] = {}

    def group(mesh: DeviceMesh) -> Any:
        # FSDP wants one description of a mesh, not several that are equal.
        if mesh not in groups:
            one = mesh.ndim == 1
            groups[mesh] = (
                _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0) if one else _fsdp_common.HSDPMeshInfo(mesh, 1, 0)
            )
        return groups[mesh]

    def placement(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(axis(parameter)), group(mesh(parameter)))

    return placement


@dataclass(frozen=True)
class Meshes:
    """The meshes for dense weights, for experts, and along an expert group (None if ep = 1), and the dispatcher of rows
    to experts."""

    dense: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh | None
    dispatcher: Dispatcher | None


def make_meshes(axes: Axes, device: str) -> Meshes:
    """Makes the meshes for these parallel dimensions over all ranks, or returns the ones made before. All ranks have to
    call this."""
    return _made(replace(axes, said=""), device, dist.group.WORLD)


@lru_cache(maxsize=16)
def _made(axes: Axes, device: str, _: dist.ProcessGroup | None) -> Meshes:
    shards = ("dp_replicate", "dp_shard")
    if axes.ep == 1:
        dense = _mesh(device, shards, (axes.dp_replicate, axes.dp_shard))
        return Meshes(dense, dense, None, None)
    names = ("dp_replicate", "efsdp", "ep")
    whole = _mesh(device, names, (axes.dp_replicate, axes.efsdp, axes.ep), replicated=True)
    experts = whole["dp_replicate", "efsdp"] if axes.dp_replicate > 1 else whole["efsdp"]
    dense = _mesh(device, shards, (axes.dp_replicate, axes.dp_shard))
    dispatcher = Dispatcher(_hops(axes), whole.get_local_rank("ep"))
    return Meshes(dense, experts, whole["ep"], dispatcher)


def _mesh(device: str, names: Sequence[str], sizes: Sequence[int], replicated: bool = False) -> DeviceMesh:
    """Makes a mesh with these axes. The axis of replicas is left out if there is only one, unless `replicated`."""
    first = 0 if sizes[0] > 1 or replicated else 1
    ranks = torch.arange(dist.get_world_size()).view(*sizes[first:])
    groups = [_group_along(ranks, axis, "weights") for axis in range(ranks.ndim)]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=tuple(names[first:]))


def _hops(axes: Axes) -> list[dist.ProcessGroup]:
    """Returns the process groups over which rows travel to their experts.

    This is the expert group; if it spans nodes, first the group of the ranks with the same index in each node, then the
    group of the ranks in a node. Weights have other groups, because they are gathered at the same time, and NCCL
    executes the operations of a group one by one.
    """
    in_node = axes.ep // axes.nodes
    if axes.nodes == 1 or in_node == 1:
        return [_group_along(torch.arange(dist.get_world_size()).view(-1, axes.ep), 1, "rows")]
    ranks = torch.arange(dist.get_world_size()).view(-1, axes.nodes, in_node)
    return [_group_along(ranks, 1, "rows"), _group_along(ranks, 2, "rows")]


def _group_along(ranks: Tensor, axis: int, carries: Literal["weights", "rows"]) -> dist.ProcessGroup:
    """Returns the process group that contains this rank and extends along an axis of the grid of ranks. All ranks have
    to call this."""
    rows = ranks.movedim(axis, -1).flatten(0, -2).tolist() if ranks.ndim > 1 else [ranks.tolist()]
    groups = [_group(tuple(row), carries, dist.group.WORLD) for row in rows]
    return next(group for group, row in zip(groups, rows, strict=True) if dist.get_rank() in row)


@cache
def _group(ranks: tuple[int, ...], carries: str, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Makes, once for all meshes, the process group in which these ranks exchange weights or rows.

    Each group has its own threads, and gloo's wake a hundred times a second. With separate groups for each mesh, eight
    ranks on two cores had 170 threads each, and spent a third of their time in the system.
    """
    return world if carries == "weights" and len(ranks) == dist.get_world_size() else dist.new_group(ranks)


def shard_model(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    kept: Collection[nn.Parameter],
    meshes: Meshes,
    offload: bool = False,
) -> None:
    """Shards the parameters of a model in place with FSDP2: block by block, then all parameters outside of blocks together.

    The direct parameters of the modules `experts` stack the experts of a layer; the parameters in `kept` are not
    sharded. With `offload`, shards, their gradients and the optimizer state are in the machine's memory, from which the
    weights of a block are copied while it runs.
    """
    stacked: set[nn.Parameter] = set()
    for module in experts:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if meshes.ep is not None:
                parameter = nn.Parameter(_part(parameter, meshes.ep), requires_grad=parameter.requires_grad)
                setattr(module, name, parameter)
            stacked.add(parameter)
    ranks, ep = meshes.experts.size(meshes.experts.ndim - 1), 1 if meshes.ep is None else meshes.ep.size()

    def axis(parameter: nn.Parameter) -> int:
        return expert_axis(parameter.shape, ranks, ep) if parameter in stacked else 0

    placement: Placement
    if meshes.ep is None:
        placement = lambda parameter: Shard(axis(parameter))  # noqa: E731
    else:
        placement = on_meshes(axis, lambda parameter: meshes.experts if parameter in stacked else meshes.dense)
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in [*blocks, model]:
        fully_shard(
            module, mesh=meshes.dense, shard_placement_fn=placement, ignored_params=set(kept), offload_policy=policy
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise fp32 is multiplied by 1 within the sum, which gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)


def _part(parameter: nn.Parameter, ep: DeviceMesh) -> DTensor:
    """Returns this rank's experts of a weight that every rank has in full."""
    each = parameter.shape[0] // ep.size()
    local = parameter.detach().narrow(0, ep.get_local_rank() * each, each).clone()
    return DTensor.from_local(local, ep, [Shard(0)], run_check=False)
