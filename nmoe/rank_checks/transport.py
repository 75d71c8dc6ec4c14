"""Checks the communication between ranks: dtypes, process groups, and rows that are sent to experts and back."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe.config.tables.model import ParallelSection
from nmoe.errors import ShortfallError
from nmoe.parallel.axes import Axes, resolve
from nmoe.parallel.dispatcher import Dispatcher, exchange
from nmoe.parallel.mesh import make_meshes
from nmoe.rank_checks.training import all_axes

EXPERTS, WIDTH = 24, 3
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
)


def check_dtypes() -> str:
    """Checks that rows of every dtype arrive at the right rank, in unequal numbers and even none."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in DTYPES:
        # Rank r sends (r + 2 * i) % 3 rows to rank i, all of the value 1 + r.
        send = [(rank + 2 * i) % 3 for i in range(world)]
        receive = [(i + 2 * rank) % 3 for i in range(world)]
        rows = torch.full((sum(send), WIDTH), 1 + rank).to(dtype)
        came = exchange(rows, send, receive)
        expected = torch.repeat_interleave(torch.arange(1, world + 1), torch.tensor(receive))
        if came.dtype != dtype or not torch.equal(came.float(), expected.float().unsqueeze(1).expand(-1, WIDTH)):
            raise ShortfallError(f"{dtype}: rank {rank} received {came.tolist()}, not the values {expected.tolist()}")
    return f"{len(DTYPES)} dtypes over {dist.get_backend()}"


def check_meshes() -> str:
    """Checks that replicas and expert groups consist of the right ranks, and that all models use the same process groups.

    The same ranks have to have one process group for weights, along any dimension, and another for rows.
    """
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for parallel in all_axes(world):
        axes = resolve(parallel, world, world, EXPERTS)
        meshes = make_meshes(axes, "cpu")
        if make_meshes(replace(axes, said="asked again"), "cpu") is not meshes:
            raise ShortfallError(
                f"{axes.dp_replicate} x {axes.efsdp} x {axes.ep}: a second model gets other process groups"
            )
        replica = rank // axes.dp_shard
        _equal(
            "the ranks that share a replica",
            _ranks(meshes.dense),
            range(replica * axes.dp_shard, (replica + 1) * axes.dp_shard),
        )
        if meshes.ep is not None:
            first = rank // axes.ep * axes.ep
            _equal("the expert group", _ranks(meshes.ep), range(first, first + axes.ep))
            sharing = range(replica * axes.dp_shard + rank % axes.ep, (replica + 1) * axes.dp_shard, axes.ep)
            _equal("the ranks that share an expert", _ranks(meshes.experts), sharing)
        found.append(f"{axes.dp_replicate} x {axes.efsdp} x {axes.ep}")
        for mesh in (meshes.dense, meshes.experts, meshes.ep or meshes.experts):
            group = mesh.get_group(mesh.ndim - 1)
            if groups.setdefault(tuple(_ranks(mesh)), group) is not group:
                raise ShortfallError(f"{found[-1]}: ranks {_ranks(mesh)} have two process groups for weights")
            if meshes.dispatcher is not None and group in meshes.dispatcher.groups:
                raise ShortfallError(f"{found[-1]}: ranks {_ranks(mesh)} have one process group for weights and rows")
    return ", ".join(found)


def _ranks(mesh: torch.distributed.device_mesh.DeviceMesh) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))


def _equal(name: str, found: list[int], expected: range) -> None:
    if found != list(expected):
        raise ShortfallError(f"{name}, of rank {dist.get_rank()}: {found}, not {list(expected)}")


def check_dispatch() -> str:
    """Checks that rows arrive at the ranks of their experts, correctly sorted, and return to their positions, as do
    their gradients.

    Two hops have to give the same bits as one. Some ranks send nothing, and some experts get nothing.
    """
    world, tried = dist.get_world_size(), []
    for ep in (n for n in range(2, world + 1) if world % n == 0 and EXPERTS % n == 0):
        for per_node in (n for n in range(1, ep + 1) if ep % n == 0):
            axes = resolve(ParallelSection(ep=ep), world, per_node, EXPERTS)
            dispatcher = make_meshes(axes, "cpu").dispatcher
            assert dispatcher is not None, "ep is at least 2"
            for loads in ("random", "one expert", "one rank sends"):
                _check_rows(dispatcher, axes, loads)
            tried.append(f"ep {ep} over {axes.nodes}")
    return ", ".join(tried) or "one rank: nothing travels"


def _check_rows(dispatcher: Dispatcher, axes: Axes, loads: str) -> None:
    rank, each = dist.get_rank(), EXPERTS // axes.ep
    first = rank // axes.ep * axes.ep
    counts = [_counts(loads, first + i, first) for i in range(axes.ep)]
    own = counts[rank - first]
    rows = _rows(own, rank).requires_grad_()
    came, counts_e, handle = dispatcher.dispatch(rows, own)
    # What this rank has to receive, by definition: its experts' rows of every rank of the group, by expert and then by rank.
    owned = (rank - first) * each
    expected = [
        _rows(c, first + i)[int(c[:e].sum()) : int(c[: e + 1].sum())]
        for e in range(owned, owned + each)
        for i, c in enumerate(counts)
    ]
    if not torch.equal(came.detach(), torch.cat(expected)):
        raise ShortfallError(
            f"ep {axes.ep} over {axes.nodes} nodes, {loads}: rank {rank} received other rows than its experts'"
        )
    if counts_e.tolist() != torch.stack(counts).sum(0)[owned : owned + each].tolist():
        raise ShortfallError(f"ep {axes.ep}, {loads}: rank {rank} counted {counts_e.tolist()} rows")
    back = dispatcher.combine(came * 2, handle)
    if not torch.equal(back.detach(), 2 * rows.detach()):
        raise ShortfallError(
            f"ep {axes.ep} over {axes.nodes} nodes, {loads}: rows of rank {rank} came back to other places"
        )
    weight = _rows(own, rank + 100)
    (gradient,) = torch.autograd.grad((back * weight).sum(), rows)
    if not torch.equal(gradient, 2 * weight):
        raise ShortfallError(f"ep {axes.ep} over {axes.nodes} nodes, {loads}: rank {rank} has gradients of other rows")
    _check_traffic(dispatcher, axes, counts, first)


def _check_traffic(dispatcher: Dispatcher, axes: Axes, counts: list[Tensor], first: int) -> None:
    """Checks the bytes that an expert group sent, there and back, forward and backward.

    A row is sent to another node if its expert is there, and within a node if its expert's rank has another index
    there.
    """
    per_node = axes.ep // axes.nodes
    rows = 0
    for source, of_experts in enumerate(counts):
        for owner, count in enumerate(of_experts.view(axes.ep, -1).sum(1).tolist()):
            hops = (source // per_node != owner // per_node) + (source % per_node != owner % per_node)
            rows += count * (hops if axes.nodes > 1 else source != owner)
    sent: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(sent, dispatcher.sent().sent_bytes)
    _equal("bytes sent", [sum(sent[first : first + axes.ep])], range(expected := 4 * rows * 4 * WIDTH, expected + 1))


def _counts(loads: str, rank: int, first: int) -> Tensor:
    """Returns the number of rows that this rank has for each expert."""
    generator = torch.Generator().manual_seed(rank)
    counts = torch.randint(4, (EXPERTS,), generator=generator)
    if loads == "one expert":
        counts[torch.arange(EXPERTS) != 1] = 0
    return counts * (rank == first) if loads == "one rank sends" else counts


def _rows(counts: Tensor, seed: int) -> Tensor:
    return torch.randn(int(counts.sum()), WIDTH, generator=torch.Generator().manual_seed(seed))
