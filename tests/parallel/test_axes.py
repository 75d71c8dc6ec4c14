"""Which axes a [parallel] table gives for a number of ranks, by value, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from nmoe.config.tables.model import ParallelSection
from nmoe.errors import UserError
from nmoe.parallel.axes import Axes, resolve


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
