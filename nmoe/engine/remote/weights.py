"""How a learner's weights reach engine servers: through files that both see, as whole weights or as an adapter."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from nmoe.engine.remote.server import EngineServer
from nmoe.model.lora import Lora
from nmoe.model.peft_format import adapter_tensors, save_adapter
from nmoe.model.shards import SINGLE

Transport = Literal["disk", "adapter"]
"""What a publication sends: all weights, or those of an adapter."""
Format = Literal["hf", "nmoe"]
"""The names of tensors: Hugging Face's for vLLM, nmoe's for its own server, which stores every model."""
# Memory that looks like a directory: weights that both processes see without a disk between.
_SHARED_MEMORY = Path("/dev/shm")


class Source(Protocol):
    """A learner, as its weights are published."""

    lora: Lora | None

    def weights(self, format: Format) -> Iterator[tuple[str, Tensor]]: ...


@dataclass
class Prepared:
    """One version's weights, written where servers read them. `info` is the body of an update."""

    info: dict[str, Any]
    size: int
    directory: Path

    def discard(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def prepared(source: Source, kind: Transport, format: Format) -> Prepared:
    """Writes the present weights in a format, or with `adapter` only the adapter's in PEFT's, into a new directory. All ranks
    gather them, on the thread that trains."""
    from safetensors.torch import save_file

    directory = Path(tempfile.mkdtemp(prefix="nmoe_weights_", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
    if kind == "adapter":
        assert source.lora is not None, "a run without [lora] has no adapter"
        held = {name: tensor.detach().cpu() for name, tensor in adapter_tensors(source.lora).items()}
        save_adapter(source.lora, directory)
    else:
        held = dict(source.weights(format))
        save_file(held, directory / SINGLE, metadata={"format": "pt"})
    digests = list(map(digest_of, held.values()))
    info = {"transport": kind, "path": str(directory), "names": list(held), "digests": digests}
    return Prepared(info, sum(tensor.nbytes for tensor in held.values()), directory)


def digest_of(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's bytes, in hexadecimal."""
    import torch

    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


async def commit(server: EngineServer, update: Prepared, version: int, initialise: bool) -> None:
    """Has a server take weights under a version. It answers again when this returns, so that its samples can be compared with the
    learner's: vLLM answers nothing while it is paused, and an update without a pause ends its engine."""
    await server.control("/pause", params={"mode": "keep", "clear_cache": "true"})
    if initialise:
        await server.control("/init_weight_transfer_engine", {"init_info": {}})
    await server.control("/start_weight_update")
    await server.control("/update_weights", {"update_info": update.info}, size=update.size)
    await server.control("/finish_weight_update", {"weight_version": str(version)})
    await server.control("/resume")
