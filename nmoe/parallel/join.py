"""Connects this process with the other ranks of a distributed run, as torchrun's environment variables describe it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from nmoe.errors import UserError
from nmoe.parallel.gang import DEADLINE, Controller, Gang, Member, use

SAVING = "save parts"
"""The name of a thread that writes checkpoint files, and for this takes part in separate collective operations."""
OWN_GPU = "NMOE_OWN_GPU"
"""The environment variable by which a launcher says that the first GPU which a rank sees is its own, and no other rank's."""
_PATIENCE_S, _ASKED_EVERY_S = 30.0, 0.05
"""Seconds that rank 0 waits before it names the missing ranks, and seconds between two checks for them."""


def join(arguments: Sequence[str]) -> Gang:
    """Connects this process with the other ranks, and returns its gang: its access to all ranks (`nmoe.parallel.gang`).

    The environment has to set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun
    and scripts for Slurm do. The backend is NCCL if each rank of this machine has its own GPU, because there are enough or the
    launcher shows it one (`OWN_GPU`), else gloo. Raises UserError if a variable is missing, if not all ranks arrive, and if
    ranks have different code, versions or arguments.
    """
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    local_rank, local_size = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", size)
    gpus, own = torch.cuda.device_count() if torch.cuda.is_available() else 0, os.environ.get(OWN_GPU) == "1"
    if gpus >= (1 if own else local_size):
        torch.cuda.set_device(0 if own else local_rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    store = _meet(rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=DEADLINE)
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
        received: list[Any] = [None]
        dist.broadcast_object_list(received)
        address, key = received[0]
        connection = Client(address, authkey=key)
        connection.send(rank)
        found = Member(rank, size, local_size, connection)
    use(found)
    return found


def _number(name: str, default: int | None = None) -> int:
    value = os.environ.get(name, "" if default is None else str(default))
    if not value.isdecimal():
        raise UserError(
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']!r} in the environment, and {name} = {value!r} is no number: start the ranks "
            "with torchrun, or unset WORLD_SIZE for one process"
        )
    return int(value)


def _meet(rank: int, size: int) -> dist.Store:
    """Returns the store in which the ranks register, once all have arrived. The store is in rank 0 or in torchrun.

    Raises UserError if ranks do not arrive. Ranks that have found rank 0 leave the error message to it, and end with
    its exit code.
    """
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT")
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=DEADLINE))
        else:
            store = dist.TCPStore(host, port, size, rank == 0, DEADLINE, wait_for_workers=False)
        store.set(f"here {rank}", "")
    except (dist.DistError, RuntimeError, ValueError) as error:
        what, remedy = ("cannot listen at", "choose a free MASTER_PORT")
        if rank > 0:
            what, remedy = "did not find rank 0 at", "start it, and give all ranks its MASTER_ADDR and MASTER_PORT"
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"rank {rank} of {size} {what} {host}:{port}: {reason}; {remedy}") from error
    if rank == 0:
        _wait_for_all(store, size, f"{host}:{port}")
        store.set("all here", "")
    else:
        _follow_rank_0(store)
    return dist.PrefixStore("nmoe", store)


def _wait_for_all(store: dist.Store, size: int, where: str) -> None:
    # By asking again and again, because torch complains of a wait that ends without success.
    began, announced, missing = time.monotonic(), False, list(range(1, size))
    while missing := [rank for rank in missing if not store.check([f"here {rank}"])]:
        named = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} of {size}"
        if time.monotonic() - began > DEADLINE.total_seconds():
            store.set("given up", "")
            # Those that came leave before the store is gone, of which torch would complain.
            time.sleep(10 * _ASKED_EVERY_S)
            raise UserError(
                f"{named} did not come to {where} within {DEADLINE}; start all of them, with the same MASTER_ADDR and MASTER_PORT"
            )
        if not announced and time.monotonic() - began > _PATIENCE_S:
            print(f"waiting at {where} for {named}", file=sys.stderr, flush=True)
            announced = True
        time.sleep(_ASKED_EVERY_S)


def _follow_rank_0(store: dist.Store) -> None:
    """Waits until rank 0 has seen all ranks; ends this process if rank 0 gives up."""
    until = time.monotonic() + DEADLINE.total_seconds() + _PATIENCE_S
    with suppress(dist.DistError):
        while time.monotonic() < until:
            if store.check(["all here"]):
                return
            if store.check(["given up"]):
                break
            time.sleep(_ASKED_EVERY_S)
    raise SystemExit(UserError.exit_code)


@contextmanager
def reports_to_torchrun() -> Iterator[None]:
    """Writes an error that ends the `with` block to torchrun's error file, so that torchrun's report, the last output,
    names it."""
    handler, file = ErrorHandler(), os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        yield
    except UserError as error:
        if file is not None:
            said = f"error: {error}"
            more = {"py_callstack": said, "timestamp": str(int(time.time()))}
            Path(file).write_text(json.dumps({"message": {"message": said, "extraInfo": more}}))
        raise
    except Exception as error:
        handler.record_exception(error)
        raise


def _refuse_others(rank: int, arguments: Sequence[str]) -> None:
    """Ends every rank if one of them has other code, versions or arguments than rank 0.

    Rank 0 raises UserError; the other ranks end without a message, with the same exit code.
    """
    source = hashlib.sha256()
    root = Path(__file__).parents[1]
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
                    # Later than rank 0, because torchrun stops all ranks as soon as one has failed; and without the usual end of a
                    # process, which was aborted one of six times on a busy machine, as gloo's threads outlive what they use.
                    time.sleep(20 * _ASKED_EVERY_S)
                    os._exit(UserError.exit_code)
                dist.destroy_process_group()
                raise UserError(
                    f"rank {other} has other {name} than rank 0, {value!r} beside {found[0][name]!r}; start all ranks alike"
                )


def leave() -> None:
    """Disconnects this process from the other ranks, after its part of a checkpoint is written."""
    use(Gang())
    for thread in threading.enumerate():
        if thread.name == SAVING:
            thread.join()
    if dist.is_initialized():
        dist.destroy_process_group()
