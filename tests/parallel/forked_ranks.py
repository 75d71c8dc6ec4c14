"""Ranks as torchrun would start them, forked from a process that has imported torch. torchrun itself starts the ranks of
tests/acceptance."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import torch
from forked import Forked

HERE = Path(__file__).parent


def forked(
    script: str, *cases: Sequence[str], missing: int = 0, port: int = 0
) -> list[tuple[int | str | None, str, str]]:
    """Exit code, stdout and stderr of each rank of a script beside this file. Every rank has a case, its arguments; so many more
    ranks, the last ones, are `missing`."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(len(cases) + missing), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        Forked(
            Path.cwd(),
            HERE / script,
            *case,
            before=_one_thread,
            main="forked:script",
            environment=place | {"RANK": str(rank)},
        )
        for rank, case in enumerate(cases)
    ]
    return [(one.code, one.out, one.err) for one in (rank.ended() for rank in ranks)]


def _one_thread() -> None:
    torch.set_num_threads(1)


def on_ranks(ranks: int, script: str, *arguments: str) -> str:
    """What a script prints on so many ranks with the same arguments, rank by rank. All have to end with 0."""
    said = forked(script, *[arguments] * ranks)
    assert [code for code, _, _ in said] == [0] * ranks, "\n".join(err[-3000:] for _, _, err in said)
    return "".join(out for _, out, _ in said)
