"""What each rank of test_rank_checks.py runs: `python saving_ranks.py DIRECTORY CASE`, as torchrun sets the environment."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nmoe.parallel.sharded_files import ShardedFiles


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    """The same on every rank: axes that no number of ranks divides, fewer rows than ranks, no axes, low precision."""
    draw = torch.Generator().manual_seed(3)
    first = {"odd": torch.randn(5, 3, generator=draw), "row": torch.randn(1, 4, generator=draw)}
    second = {
        "odd": torch.randn(7, 2, generator=draw),
        "step": torch.tensor(11.0),
        "bias": torch.randn(6, generator=draw),
        "low": torch.randn(4, 6, generator=draw).bfloat16(),
        "double": torch.randn(3, generator=draw).double(),
    }
    return {"model.safetensors": first, "optimizer.safetensors": second}


def sharded(whole: torch.Tensor, name: str) -> torch.Tensor:
    world = dist.get_world_size()
    if name in ("step", "bias"):
        return whole.clone()
    if name == "low" and world % 2 == 0:  # replicas of shards along the second axis
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
        return distribute_tensor(whole.clone(), mesh, [Replicate(), Shard(1)])
    return distribute_tensor(whole.clone(), init_device_mesh("cpu", (world,)), [Shard(0)])


def zero(tensor: torch.Tensor) -> None:
    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()


def main(directory: Path, case: str) -> None:
    dist.init_process_group("gloo")
    rank, expected = dist.get_rank(), tensors()
    files = {file: {name: sharded(whole, name) for name, whole in of.items()} for file, of in expected.items()}
    writer = ShardedFiles()
    size = writer.hold(files, copied=True)
    for of in files.values():
        for tensor in of.values():
            zero(tensor)  # training goes on
    place = directory / "parts"
    if case == "full" and rank == 1:
        HuggingFaceStorageWriter.write_data = full_disk
    writer.start(place)
    # Collectives of training, meanwhile.
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    if rank == 0:
        largest, empty = 0, torch.empty

        def counted(*args: object, **kwargs: object) -> torch.Tensor:
            nonlocal largest
            made = empty(*args, **kwargs)
            if threading.current_thread() is threading.main_thread():
                largest = max(largest, made.nbytes)
            return made

        torch.empty = counted
        try:
            writer.finish(directory)
        except OSError as error:
            print(json.dumps({"error": str(error), "left": place.exists()}))
        else:
            torch.empty = empty
            equal = {file: same(directory / file, of) for file, of in expected.items()}
            print(json.dumps({"equal": equal, "size": size, "largest": largest, "left": place.exists()}))
    dist.barrier()
    dist.destroy_process_group()


def same(file: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Whether a file is the one that safetensors writes, byte by byte: the same tensors in its order."""
    return file.read_bytes() == save(expected, {"format": "pt"})


def full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
