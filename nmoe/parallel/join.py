"""How a process becomes a rank: what torchrun sets, the process group, and the controller's connections."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nmoe
from nmoe.errors import UserError
from nmoe.parallel.gang import DEADLINE, Controller, Gang, Member, use

SAVING = "save parts"
"""The name of a thread that takes part in collectives of its own."""


def join(arguments: Sequence[str]) -> Gang:
    """Joins the ranks that the environment names, as torchrun and Slurm's wrappers set it: RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Returns this process's view, which `gang` gives from then on.

    The group is NCCL's where each rank of this machine has a GPU of its own, else gloo's. Raises UserError where the ranks do not
    all come, or run other code, versions or arguments."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = (
        int(os.environ.get(f"LOCAL_{name}", default)) for name, default in (("RANK", rank), ("WORLD_SIZE", size))
    )
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    try:
        dist.init_process_group(backend, timeout=DEADLINE)
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"rank {rank} of {size} did not find the others at {where}: {reason}") from error
    _refuse_others(rank, arguments)
    if rank == 0:
        host = "127.0.0.1" if local_size == size else socket.gethostbyname(os.environ["MASTER_ADDR"])
        key = secrets.token_bytes(32)
        with Listener((host, 0), authkey=key, backlog=size) as listener:
            dist.broadcast_object_list([(listener.address, key)])
            connections: dict[int, Connection] = {}
            while len(connections) < size - 1:
                with suppress(AuthenticationError, EOFError):  # some other process may try the port
                    connection = listener.accept()
                    connections[connection.recv()] = connection
        found: Gang = Controller(size, local_size, [connections[member] for member in range(1, size)])
    else:
        told: list[Any] = [None]
        dist.broadcast_object_list(told)
        address, key = told[0]
        connection = Client(address, authkey=key)
        connection.send(rank)
        found = Member(rank, size, local_size, connection)
    use(found)
    return found


def _refuse_others(rank: int, arguments: Sequence[str]) -> None:
    """Ends every rank where one differs from rank 0, which says so: it raises UserError, and the others end with its exit code."""
    source = hashlib.sha256()
    root = Path(nmoe.__file__).parent
    for path in sorted(root.rglob("*.py")):
        source.update(path.read_bytes())
    own = {
        "Python": sys.version.split()[0],
        "torch": torch.__version__,
        "code of nmoe": source.hexdigest()[:12],
        "arguments": " ".join(arguments),
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for other, theirs in enumerate(found):
        for name, value in theirs.items():
            if value != found[0][name]:
                if rank > 0:
                    raise SystemExit(UserError.exit_code)
                raise UserError(
                    f"rank {other} has other {name} than rank 0, {value!r} beside {found[0][name]!r}; start all ranks alike"
                )


def leave() -> None:
    """Ends this process's part in the gang, once it has written its part of a checkpoint."""
    use(Gang())
    for thread in threading.enumerate():
        if thread.name == SAVING:
            thread.join()
    if dist.is_initialized():
        dist.destroy_process_group()
