"""Takes new weights for a served model: from files, by broadcast, as an adapter, or as the difference from those that it has.

An update is one whole set of tensors, under the names of a checkpoint, with the SHA-256 of each; a difference names the old ones'
digests, too, and is refused where the last update's are others. The engine samples on while tensors arrive and are checked; all of
them are then copied between two of its steps. After an update that failed, it takes no request until one has succeeded.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.difference import patched
from nmoe.engine.remote.weights import Backend, device_of, digest_of, group_of
from nmoe.engine.server.requests import check_names, take
from nmoe.errors import InfrastructureError, UserError
from nmoe.model.checkpoint import checkpoint_tensors
from nmoe.model.families import family_of, native
from nmoe.model.families.base import filling
from nmoe.model.lora import Lora
from nmoe.model.peft_format import WEIGHTS, resume_adapter
from nmoe.model.shards import open_tensors
from nmoe.model.transformer import Transformer

_INIT = ("host", "port", "rank", "world_size", "backend", "timeout_s")
_UPDATE = ("transport", "names", "digests", "path", "dtypes", "shapes", "bases")
_HOW = "send a whole one: /start_weight_update, /update_weights, /finish_weight_update"
_SHOWN = 5


class StateError(UserError):
    """The server cannot do this in its present state."""


class Weights:
    """The weights of a served model, and their version. `id` is drawn anew at the start and with each update, because
    versions repeat. `unusable` says why the last update failed, or is empty."""

    def __init__(self, engine: NativeEngine, model: Transformer, lora: Lora | None) -> None:
        self._engine, self._model, self._lora = engine, model, lora
        self.version, self.unusable, self.id = 0, "", secrets.token_hex(8)
        self._started = False
        self._put: Callable[[], None] | None = None  # copies what has arrived
        self._arrived: dict[str, str] = {}  # digests of the tensors that have come, and of the model
        self._holds: dict[str, str] = {}
        self._group: Any = None
        self._backend: Backend = "gloo"

    def check_usable(self) -> None:
        """Raises StateError after an update that failed."""
        if self.unusable:
            raise StateError(f"the weights cannot be used: {self.unusable}")

    async def join(self, info: Any) -> None:
        """Joins the sender's process group, for the transport "group"; other transports need none, and no `host`."""
        check_names(info, "init_info", _INIT)
        self._group = None
        if not (host := take(info, "host", str, "")):
            return
        port, rank, size = (take(info, name, int) for name in ("port", "rank", "world_size"))
        timeout = timedelta(seconds=take(info, "timeout_s", (int, float), 300.0))
        self._backend = take(info, "backend", str, "gloo")
        if self._backend not in get_args(Backend) or (self._backend == "nccl" and not torch.cuda.is_available()):
            raise UserError(f"backend = {self._backend!r}: must be 'gloo', or 'nccl' on a GPU")
        try:
            # Between steps, since no kernel of the engine may be under way.
            self._group = await self._engine.between_steps(
                partial(_joined, host, port, rank, size, self._backend, timeout)
            )
        except (RuntimeError, ValueError) as error:
            raise InfrastructureError(f"no process group with {host}:{port}: {_first_line(error)}") from None

    def start(self) -> None:
        self._started, self._put = True, None

    async def update(self, info: Any) -> None:
        """Receives a whole set of tensors, which `finish` copies into the model."""
        if not self._started:
            raise StateError("no update has begun; call /start_weight_update first")
        self._put = None
        try:
            check_names(info, "update_info", _UPDATE)
            transport, names, digests = take(info, "transport", str), _texts(info, "names"), _texts(info, "digests")
            tensors = await asyncio.to_thread(self._received, transport, info, names)
            await asyncio.to_thread(_check, tensors, names, digests)
            self._put, self._arrived = self._copier(transport, info, tensors), dict(zip(names, digests, strict=True))
        except Exception as error:
            self._fail(error)
            raise

    async def finish(self, version: str, keep_cache: bool = False) -> None:
        """Makes the engine sample by the weights that have arrived, under their version. With `keep_cache`, running requests go on
        with the keys and values of the weights before."""
        if (put := self._put) is None:
            raise StateError(f"no weights have arrived since an update began; {_HOW}")
        if not (version.isascii() and version.isdecimal()):
            raise UserError(f"weight_version = {version!r}: must be a whole number as text, such as '7'")
        self.id = secrets.token_hex(8)  # before the first token by them
        try:
            await self._engine.replace_weights(put, int(version), recompute=not keep_cache)
        except Exception as error:
            self._fail(error)
            raise
        self._started, self._put, self._holds = False, None, self._arrived
        self.version, self.unusable = int(version), ""

    def _fail(self, error: Exception) -> None:
        self._started, self._put, self._holds = False, None, {}
        self.unusable = f"the last update failed ({_first_line(error)}); {_HOW}"

    def _received(self, transport: str, info: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
        if transport == "group":
            return self._broadcast(info, names)
        path = Path(take(info, "path", str))
        if transport == "adapter":
            try:
                return load_file(path / WEIGHTS)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path / WEIGHTS}: cannot be read: {error}") from None
        if transport not in ("disk", "delta"):
            raise UserError(f"transport = {transport!r}: must be 'disk', 'delta', 'group' or 'adapter'")
        if transport == "delta" and self._holds != dict(zip(names, _texts(info, "bases"), strict=False)):
            raise StateError(
                "transport = 'delta': it is from other weights than the last update's; send all, as 'disk'"
            )
        stored = open_tensors(path)
        if transport == "disk":
            return {name: stored.read(name) for name in stored.files}
        present = checkpoint_tensors(self._model, own_format="embedding.weight" in names)
        return patched({name: make() for name, _, make in present}, stored)

    def _broadcast(self, info: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
        """Receives every tensor, wrong ones too, so that the sender does not wait for this server."""
        if self._group is None:
            raise StateError("transport = 'group' needs a process group; call /init_weight_transfer_engine first")
        dtypes, shapes = _texts(info, "dtypes"), take(info, "shapes", list)
        tensors = {}
        try:
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device_of(self._backend))
                self._group.broadcast(tensor, 0).wait()
                tensors[name] = tensor
        except RuntimeError as error:
            self._group = None
            raise InfrastructureError(f"the broadcast broke off: {_first_line(error)}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"update_info: dtypes or shapes do not fit the names: {error}") from None
        return tensors

    def _copier(self, transport: str, info: dict[str, Any], tensors: dict[str, Tensor]) -> Callable[[], None]:
        if (transport == "adapter") != (self._lora is not None):
            of = "an adapter on its base" if self._lora is not None else "a whole model"
            raise UserError(
                f"transport = {transport!r}: this server was started on {of}, and takes weights of this kind"
            )
        if self._lora is not None:
            return partial(resume_adapter, self._lora, Path(info["path"]), tensors)
        config = self._model.config
        family = native if "embedding.weight" in tensors else family_of(config)
        buffers = [name for name, _ in self._model.named_buffers()]
        return filling(self._model.state_dict(), family, config, _Received(tensors), buffers)


class _Received:
    """Received tensors in the form that the loader of checkpoints reads."""

    listing = Path("update")

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.files = dict.fromkeys(tensors, self.listing)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def dtype(self, name: str) -> torch.dtype | None:
        return self._tensors[name].dtype

    def dtype_name(self, name: str) -> str:
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._tensors[name] if rows is None else self._tensors[name][rows]


def _check(tensors: dict[str, Tensor], names: Sequence[str], digests: Sequence[str]) -> None:
    """Raises UserError unless each name was sent once and has arrived with its digest."""
    if len(names) != len(digests):
        raise UserError(f"update_info has {len(names)} names and {len(digests)} digests; each name has one")
    if not names:
        raise UserError("update_info has no names: an update is a whole set of weights")
    faults = [f"{name} is named {count} times" for name, count in Counter(names).items() if count > 1]
    faults += [f"{name} is missing" for name in sorted(set(names) - set(tensors))]
    faults += [f"{name} is not among the names" for name in sorted(set(tensors) - set(names))]
    if not faults:
        pairs = zip(names, digests, strict=True)
        faults = [
            f"{name} has another digest than was sent" for name, digest in pairs if digest_of(tensors[name]) != digest
        ]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise UserError(f"update refused: {'; '.join(faults[:_SHOWN])}{more}")


def _joined(host: str, port: int, rank: int, size: int, backend: Backend, timeout: timedelta) -> Any:
    return group_of(dist.TCPStore(host, port, size, False, timeout), rank, size, backend, timeout)


def _texts(table: dict[str, Any], name: str) -> list[str]:
    texts: list[str] = take(table, name, list)
    if not all(isinstance(one, str) for one in texts):
        raise UserError(f"{name}: must be a list of texts")
    return texts


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
