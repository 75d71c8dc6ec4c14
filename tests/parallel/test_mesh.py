"""The mesh of ranks: axes by value, private names of torch that expert parallelism uses, and the order of blocks of rows."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch
from packaging.version import Version
from pydantic import ValidationError

from nmoe.config.tables.model import ParallelSection
from nmoe.errors import UserError
from nmoe.parallel import mesh
from nmoe.parallel.axes import Axes, resolve
from nmoe.parallel.dispatcher import regrouped


@pytest.mark.parametrize(
    ("table", "world", "per_node", "experts", "expected"),
    [
        ({}, 1, 1, 128, (1, 1, 1, "single", 1)),
        ({}, 8, 8, 0, (1, 8, 1, "single", 1)),
        ({}, 8, 8, 128, (1, 1, 8, "ipc", 1)),
        ({}, 8, 8, 6, (1, 4, 2, "ipc", 1)),
        ({}, 1024, 8, 128, (1, 128, 8, "ipc", 1)),
        ({}, 16, 16, 128, (1, 2, 8, "ipc", 1)),  # at most 8
        ({}, 12, 6, 128, (1, 6, 2, "ipc", 1)),  # 4 divides 12 and 128 but not a node's 6 ranks
        ({"dp_replicate": 2}, 8, 8, 128, (2, 1, 4, "ipc", 1)),
        ({"dp_replicate": 2, "dp_shard": 4, "ep": 2}, 8, 8, 128, (2, 2, 2, "ipc", 1)),
        ({"ep": 1}, 8, 8, 128, (1, 8, 1, "single", 1)),
        ({"ep": 16}, 16, 8, 128, (1, 1, 16, "hybrid", 2)),
        ({"rdep": "hybrid"}, 4, 2, 12, (1, 1, 4, "hybrid", 2)),
        ({"ep": 2}, 4, 1, 12, (1, 2, 2, "hybrid", 2)),
        ({"ep": 4}, 12, 6, 128, (1, 3, 4, "hybrid", 4)),  # the second group has ranks of two nodes
        ({"rdep": "single"}, 8, 8, 128, (1, 8, 1, "single", 1)),
        ({"transport": "collective"}, 2, 2, 6, (1, 1, 2, "ipc", 1)),
    ],
)
def test_axes_by_value(
    table: dict[str, Any], world: int, per_node: int, experts: int, expected: tuple[int, int, int, str, int]
) -> None:
    axes = resolve(ParallelSection(**table), world, per_node, experts)
    assert (axes.dp_replicate, axes.efsdp, axes.ep, axes.rdep, axes.nodes) == expected
    assert axes.dp_replicate * axes.dp_shard == world


def test_auto_says_what_it_chose_and_why() -> None:
    assert resolve(ParallelSection(), 8, 8, 6) == Axes(
        1,
        4,
        2,
        "ipc",
        "collective",
        1,
        "parallel: dp_replicate 1 x dp_shard 8, ep 2 (auto: the largest divisor of 6 experts and 8 shards up to 8 in a node), rdep "
        "ipc, transport collective",
    )
    assert resolve(ParallelSection(ep=4), 4, 2, 8).said == (
        "parallel: dp_replicate 1 x dp_shard 4, ep 4 (as set), rdep hybrid over 2 nodes, transport collective"
    )


@pytest.mark.parametrize(
    ("table", "world", "per_node", "experts", "message"),
    [
        (
            {"dp_replicate": 3},
            8,
            8,
            128,
            r"dp_replicate = 3 does not divide the 8 ranks that run; start a multiple of 3",
        ),
        ({"dp_shard": 4}, 8, 8, 128, r"1 x 4 = 4, and 8 ranks run; start as many or set dp_shard"),
        ({"dp_replicate": 2, "dp_shard": 2}, 1, 1, 0, r"2 x 2 = 4, and 1 rank run"),
        ({"ep": 4}, 8, 8, 6, r"ep = 4 does not divide the model's experts, 6; .* 6 experts it can be 1, 2$"),
        ({"ep": 3}, 8, 8, 6, r"ep = 3 does not divide the ranks that share a replica, 8; .* it can be 1, 2$"),
        ({"ep": 8, "dp_replicate": 2}, 8, 8, 128, r"ep = 8 does not divide the ranks that share a replica, 4"),
        ({"ep": 2}, 8, 8, 0, r"ep = 2: this model has no experts"),
        (
            {"rdep": "ipc", "ep": 4},
            4,
            2,
            8,
            r'rdep = "ipc": .* ep = 4 ranks lie in 2 nodes of 2 ranks, which is "hybrid"',
        ),
        ({"rdep": "hybrid"}, 4, 4, 8, r'rdep = "hybrid": .* lie in 1 node of 4 ranks, which is "ipc"'),
        (
            {"transport": "symmetric"},
            8,
            8,
            8,
            r'transport = "symmetric": not run: needs GPUs of one node .* "collective"',
        ),
        ({"transport": "deepep"}, 8, 8, 8, r'transport = "deepep": not run: needs the package deep_ep'),
    ],
)
def test_what_does_not_fit_is_refused(
    table: dict[str, Any], world: int, per_node: int, experts: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(ParallelSection(**table), world, per_node, experts)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"dp_shard": 4, "ep": 3}, "ep: must divide dp_shard = 4"),
        ({"ep": 1, "rdep": "ipc"}, '"ipc" does not go with ep = 1'),
        ({"ep": 2, "rdep": "single"}, '"single" does not go with ep = 2'),
        ({"ep": 0}, "greater than 0"),
        ({"dp_shard": "all"}, "'auto'"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ParallelSection(**table)


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


def test_the_example_of_the_docstring() -> None:
    assert regrouped(torch.tensor([[1, 2], [1, 0]]), [0, 1], [1, 0]).tolist() == [0, 3, 1, 2]


def test_any_order_is_that_of_sorted_labels() -> None:
    counts = torch.randint(3, (2, 3, 2), generator=torch.Generator().manual_seed(0))
    for lie, wanted in product(permutations(range(3)), repeat=2):
        labels = [
            block
            for at in product(*(range(counts.shape[axis]) for axis in lie))
            for block in [tuple(at[lie.index(a)] for a in wanted)]
            * int(counts[tuple(at[lie.index(a)] for a in range(3))])
        ]
        expected = sorted(range(len(labels)), key=lambda row: (labels[row], row))
        assert regrouped(counts, lie, wanted).tolist() == expected
