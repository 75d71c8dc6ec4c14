"""Determines how the ranks of a run divide a model: the numbers of replicas, of shards, and of ranks per expert group.

The ranks of a replica are consecutive, and so are the ranks of an expert group within it: rank r of 8 with dp_replicate
= 2 and ep = 2 is in replica r // 4 and in the expert group {r // 2 * 2, r // 2 * 2 + 1}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nmoe.config.tables.model import ParallelSection
from nmoe.errors import UserError

MOST_EP = 8
"""The largest expert group that `auto` chooses, as in prime-rl: the number of GPUs of a usual node."""


@dataclass(frozen=True)
class Axes:
    """The sizes of the parallel dimensions; the number of ranks is dp_replicate x efsdp x ep, and dp_shard is efsdp x ep.

    Eight ranks of one node with 128 experts: `Axes(dp_replicate=1, efsdp=1, ep=8, rdep="ipc", transport="collective")`.
    `nodes` is the number of nodes that an expert group spans, and `said` a line to print about the choices that `auto`
    made.
    """

    dp_replicate: int
    efsdp: int
    ep: int
    rdep: Literal["single", "ipc", "hybrid"]
    transport: Literal["collective"]
    nodes: int = 1
    said: str = ""

    @property
    def dp_shard(self) -> int:
        return self.efsdp * self.ep


def resolve(section: ParallelSection, world: int, per_node: int, experts: int) -> Axes:
    """Determines the parallel dimensions for `world` ranks and a model with `experts` experts per layer (0 for a dense model).

    Each node runs `per_node` ranks (torchrun's LOCAL_WORLD_SIZE). Raises UserError if the dimensions do not multiply to
    `world`, if `ep` does not divide the experts and dp_shard, if `rdep` contradicts the ranks' distribution over nodes,
    and for an untested transport.
    """
    dp_shard = _shards(section, world)
    ep, why = _expert_ranks(section, dp_shard, per_node, experts)
    rdep, nodes = _layout(ep, per_node)
    if section.rdep not in ("auto", rdep):
        raise UserError(
            f'parallel.rdep = "{section.rdep}": expert groups of ep = {ep} ranks lie in {_count(nodes, "node")} of {per_node} '
            f'{"rank" if per_node == 1 else "ranks"}, which is "{rdep}"; set it to "{rdep}" or "auto"'
        )
    if section.transport not in ("auto", "collective"):
        needs = {"symmetric": "GPUs of one node with peer access", "deepep": "the package deep_ep and its GPUs"}
        raise UserError(
            f'parallel.transport = "{section.transport}": not run: needs {needs[section.transport]}, where it has to give what '
            'collective gives; set it to "collective" or "auto"'
        )
    said = (
        f"parallel: dp_replicate {section.dp_replicate} x dp_shard {dp_shard}, ep {ep} ({why}), rdep {rdep}"
        + (f" over {nodes} nodes" if nodes > 1 else "")
        + ("" if ep == 1 else ", transport collective")
    )
    return Axes(section.dp_replicate, dp_shard // ep, ep, rdep, "collective", nodes, said)


def _shards(section: ParallelSection, world: int) -> int:
    """Returns the number of shards, dp_shard, such that dp_replicate x dp_shard is the number of ranks."""
    replicas = section.dp_replicate
    if section.dp_shard == "auto":
        if world % replicas:
            raise UserError(
                f"parallel.dp_replicate = {replicas} does not divide the {_count(world, 'rank')} that run; start a multiple of "
                f"{replicas} or set it to a divisor of {world}"
            )
        return world // replicas
    if replicas * section.dp_shard != world:
        raise UserError(
            f"parallel: dp_replicate x dp_shard = {replicas} x {section.dp_shard} = {replicas * section.dp_shard}, and "
            f'{_count(world, "rank")} run; start as many or set dp_shard = "auto"'
        )
    return section.dp_shard


def _expert_ranks(section: ParallelSection, dp_shard: int, per_node: int, experts: int) -> tuple[int, str]:
    """Returns the size `ep` of an expert group, and a text that explains the choice."""
    if section.ep != "auto":
        ep = section.ep
        if ep > 1 and not experts:
            raise UserError(f'parallel.ep = {ep}: this model has no experts to divide; set it to 1 or "auto"')
        for name, number in (("the ranks that share a replica", dp_shard), ("the model's experts", experts)):
            if number % ep:
                possible = ", ".join(map(str, _common_divisors(dp_shard, experts)))
                raise UserError(
                    f"parallel.ep = {ep} does not divide {name}, {number}; with dp_shard = {dp_shard} and {experts} experts "
                    f"it can be {possible}"
                )
        return ep, "as set"
    if not experts:
        return 1, "auto: no experts to divide"
    if section.rdep == "single":
        return 1, 'auto: rdep is "single"'
    fitting = _common_divisors(dp_shard, experts)
    if section.rdep == "hybrid":
        return fitting[-1], f"auto: the largest divisor of {experts} experts and {_count(dp_shard, 'shard')}"
    most = min(MOST_EP, per_node)
    best = max(ep for ep in fitting if ep <= most and _layout(ep, per_node)[1] == 1)
    return (
        best,
        f"auto: the largest divisor of {experts} experts and {_count(dp_shard, 'shard')} up to {most} in a node",
    )


def _common_divisors(dp_shard: int, experts: int) -> list[int]:
    return [n for n in range(1, dp_shard + 1) if dp_shard % n == 0 and experts % n == 0]


def _layout(ep: int, per_node: int) -> tuple[Literal["single", "ipc", "hybrid"], int]:
    """Returns whether an expert group is within a node ("ipc") or spans several ("hybrid"), and how many; "single" if ep = 1.

    A group, whose first rank is a multiple of `ep`, lies within one node or consists of whole nodes; otherwise each
    rank counts as a separate node.
    """
    if ep == 1:
        return "single", 1
    if per_node % ep == 0:
        return "ipc", 1
    return "hybrid", ep // per_node if ep % per_node == 0 else ep


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def expert_axis(shape: Sequence[int], ranks: int, ep: int) -> int:
    """Returns the axis along which a weight that stacks a layer's experts is sharded over `ranks`.

    With expert groups of `ep` > 1 ranks, the first axis is already divided within the group. The result is 0 if no axis
    divides evenly.
    """
    # There are often fewer experts than ranks. FSDP splits evenly along all axes but the first.
    even = (axis for axis in range(0 if ep == 1 else 1, len(shape)) if shape[axis] % ranks == 0)
    return next(even, 0)
