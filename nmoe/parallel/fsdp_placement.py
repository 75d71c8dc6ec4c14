"""The names of FSDP2 that torch keeps private: what gives a parameter its own mesh. torchtitan imports the same ones.

Torch has them since 2.12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from nmoe.errors import UserError

Place = Callable[[nn.Parameter], Any]
"""What `fully_shard` takes as `shard_placement_fn`."""


def has_meshes_by_parameter() -> bool:
    """Whether this torch can give a parameter its own mesh, which expert parallelism needs."""
    return hasattr(_fsdp_common, "ShardPlacementResult")


def on_meshes(axis: Callable[[nn.Parameter], int], mesh: Callable[[nn.Parameter], DeviceMesh]) -> Place:
    """Shards each parameter along its own axis, on its own mesh. A mesh has one axis or, before that, one of replicas.
    Raises UserError with a torch that is too old."""
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

    def place(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(axis(parameter)), group(mesh(parameter)))

    return place
