"""The private names of torch that expert parallelism relies on, and what happens without them."""

import pytest
import torch
from packaging.version import Version

from nmoe.errors import UserError
from nmoe.parallel import mesh


def test_this_torch_has_the_names() -> None:
    version = Version(torch.__version__)
    assert mesh.has_meshes_by_parameter() == (version >= Version("2.12")), (
        f"torch {version} moved ShardPlacementResult, FSDPMeshInfo or HSDPMeshInfo: see where torchtitan imports them from"
    )
    if version >= Version("2.12"):
        assert hasattr(mesh._fsdp_common, "FSDPMeshInfo")
        assert hasattr(mesh._fsdp_common, "HSDPMeshInfo")


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mesh._fsdp_common, "ShardPlacementResult", raising=False)
    with pytest.raises(
        UserError, match=r"expert parallelism needs torch 2\.12 or later; upgrade it or set parallel\.ep = 1"
    ):
        mesh.on_meshes(lambda parameter: 0, lambda parameter: pytest.fail("never asked"))
