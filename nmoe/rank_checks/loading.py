"""Checks that ranks load a model without excess memory, each only its part, and get the same values as a single process."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nmoe.errors import ShortfallError
from nmoe.learner.learner import share_model
from nmoe.model.checkpoint import Share, export_model, load_model, new_model, save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.parallel.ranks import Ranks, like, local
from nmoe.rank_checks.twins import FAMILIES

SPARE = 5 * 2**20
"""The permitted bytes beside a rank's part and the largest weight: a piece of a stored tensor (at most 4 MiB) and small
objects."""

_WIDE: dict[str, Any] = {"hidden_size": 256, "layers": 4, "vocab_size": 4096}
_SHAPES: dict[str, dict[str, Any]] = {
    "dense": _WIDE | {"intermediate_size": 2048},
    "qwen3_moe": _WIDE | {"expert_width": 64},
    "deepseek_v3": _WIDE | {"expert_width": 64, "intermediate_size": 512},
}


class Allocated(TorchDispatchMode):
    """Measures the bytes of all living tensors that operations in the `with` block made, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on this rank's part
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, count: int) -> None:
        self.now -= count


Load = Callable[[Share | None], Transformer]


def loads(config: ModelConfig, directory: Path) -> Iterator[tuple[str, Load]]:
    """Yields the ways to get a model, each with its name: new from a seed, from Hugging Face's file layout, and from
    nmoe's layout."""
    yield "seed", lambda share: new_model(config, torch.float32, "cpu", share=share).initialize(3)
    for name in ("hf", "own"):
        yield name, lambda share, name=name: load_model(directory / name, share=share)  # type: ignore[misc]


def check_loading() -> str:
    """Checks the memory and values of new and loaded models of three families; returns a summary.

    While it loads, a rank may hold at most its part, the largest weight and `SPARE`. Every value has to equal a single
    process's.
    """
    world, largest, count = dist.get_world_size(), 0.0, 0
    for family, changes in _SHAPES.items():
        config = ModelConfig(**(FAMILIES[family] | changes))
        with _stored(config) as directory:
            for way, load in loads(config, directory):
                largest, count = max(largest, _peak_checked(load, Ranks(), f"{family} from {way}")), count + 1
    return f"{count} models on {world} ranks; the highest peak is {largest:.2f} of the whole model"


@contextmanager
def _stored(config: ModelConfig) -> Iterator[Path]:
    """Yields a temporary directory that all ranks share, with a new model in both file layouts."""
    made = [tempfile.mkdtemp(prefix="nmoe-loading-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, src=0)
    directory = Path(made[0])
    if dist.get_rank() == 0:
        model = Transformer(config).initialize(5)
        (directory / "own").mkdir()
        save_model(model, directory / "own")
        export_model(model, directory / "hf")
    dist.barrier()
    yield directory
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)


def _peak_checked(load: Load, ranks: Ranks, what: str) -> float:
    """Loads a model on all ranks, and returns the peak memory as a share of the whole model.

    Raises ShortfallError if the peak is too high or a value differs from a single process's.
    """
    expected = load(None).state_dict()
    with Allocated() as allocated:
        model = load(partial(share_model, ranks=ranks, device=torch.device("cpu")))
    state = model.state_dict()
    # `like` cuts parts as loading does; that FSDP cuts them alike is what the check of families shows.
    wrong = [
        f"{name} is not what one process loads"
        for name, tensor in state.items()
        if not torch.equal(local(tensor), local(like(expected[name], tensor)))
    ]
    part = sum(_bytes(tensor.to_local() if isinstance(tensor, DTensor) else tensor) for tensor in state.values())
    most = part + max(map(_bytes, expected.values())) + SPARE
    if allocated.peak > most or allocated.peak < part:
        wrong.append(f"rank {ranks.rank} allocated {allocated.peak:,} bytes at once, of {part:,} to {most:,}")
    for found in ranks.gather(wrong):
        if found:
            raise ShortfallError(f"{what}: {found[0]}")
    return allocated.peak / sum(map(_bytes, expected.values()))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
