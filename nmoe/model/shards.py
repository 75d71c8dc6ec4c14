"""Reads and writes the tensors of a checkpoint directory one by one: one safetensors file, or several shards with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nmoe.errors import UserError
from nmoe.gguf_file import is_gguf
from nmoe.model.gguf.tensors import GGUFTensors
from nmoe.parsing import json_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Reading maps the file, and touched pages stay in memory until the mapping is closed. So a file is reopened after this many
# bytes.
_MAPPED_BYTES = 16 * 2**20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StoredTensors(Protocol):
    """The tensors of a checkpoint in either format: `Shards` (safetensors) or `GGUFTensors`. `files` and `shapes` have the tensors'
    names as keys."""

    listing: Path  # what names them all
    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    def dtype(self, name: str, /) -> torch.dtype | None:
        """Returns the dtype that a tensor is stored in; None if it is not supported."""

    def dtype_name(self, name: str, /) -> str:
        """Returns the tensor's type as the file format names it, such as BF16."""

    def nbytes(self, name: str, /) -> int:
        """Returns the size in bytes of a tensor as `read` returns it."""

    def read(self, name: str, rows: slice | None = None, /) -> Tensor:
        """Reads one tensor, or only these rows of its first axis."""


def open_tensors(checkpoint: Path) -> StoredTensors:
    """Opens the tensors of a checkpoint directory or of a GGUF file. Raises UserError as `Shards` and `GGUFTensors` do."""
    return GGUFTensors(checkpoint) if is_gguf(checkpoint) else Shards(checkpoint)


class Shards:
    """The tensors of a safetensors checkpoint, `model.safetensors` or else the shards in `model.safetensors.index.json`: names,
    shapes and dtypes are read at once, data on request. At most 16 MiB and one tensor are in memory.

    Raises UserError, naming file and tensor, for a tensor or file that is missing, damaged, not where the index says, or outside
    the directory.
    """

    def __init__(self, directory: Path) -> None:
        if (directory / SINGLE).exists() or not (directory / INDEX).exists():
            self.listing = directory / SINGLE
            files: dict[Path, list[str] | None] = {self.listing: None}
        else:
            self.listing = directory / INDEX
            files = dict(_read_index(self.listing))
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._codes: dict[str, str] = {}
        self._opened: tuple[Path, Any] | None = None
        self._mapped = 0
        for path, listed in files.items():
            opened = self._open(path)
            present = set(opened.keys())
            for name in sorted(present) if listed is None else listed:
                if name not in present:
                    raise UserError(f"{self.listing}: {name} should be in {path.name}, which has no such tensor")
                part = opened.get_slice(name)
                self.files[name] = path
                self.shapes[name] = tuple(part.get_shape())
                self._codes[name] = part.get_dtype()

    def dtype(self, name: str) -> torch.dtype | None:
        """Returns the dtype that a tensor is stored in; None if it is not supported here."""
        return _DTYPES.get(self._codes[name])

    def dtype_name(self, name: str) -> str:
        """Returns the dtype as safetensors writes it, such as BF16."""
        return self._codes[name]

    def nbytes(self, name: str) -> int:
        """Returns the size of a stored tensor in bytes; 0 if its dtype is not supported here."""
        dtype = self.dtype(name)
        return 0 if dtype is None else math.prod(self.shapes[name]) * dtype.itemsize

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Reads one tensor, as stored, or only these rows of its first axis. The caller must free it before reading the next, or
        the bound on memory does not hold."""
        path = self.files[name]
        if self._opened is None or self._opened[0] != path or self._mapped > _MAPPED_BYTES:
            self._opened = None  # the old mapping goes before a new one comes
            self._opened, self._mapped = (path, self._open(path)), 0
        try:
            opened = self._opened[1]
            tensor: Tensor = opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: {name} cannot be read: {error}") from None
        self._mapped += tensor.nbytes
        return tensor

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            listed = f", though {self.listing.name} names it" if path != self.listing else ""
            raise UserError(f"{path}: no such file{listed}") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: torn or not a safetensors file: {error}") from None


def _read_index(path: Path) -> dict[Path, list[str]]:
    """Reads an index: returns the names of the tensors in each shard file. Raises UserError for a damaged index or a shard outside
    the index's directory."""
    try:
        raw = json_of(path.read_bytes())
        weight_map = raw["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as an index of shards: {error!r}") from None
    shards: dict[Path, list[str]] = {}
    for name, file in pairs:
        if file != Path(file).name or "\\" in file or file in ("", ".", ".."):
            raise UserError(f"{path}: {name} lies in {file!r}, which is not a file of this directory")
        shards.setdefault(path.parent / file, []).append(name)
    return shards


def write_shards(directory: Path, tensors: Iterable[tuple[str, int, Callable[[], Tensor]]], shard_bytes: int) -> None:
    """Writes tensors, each given as name, size in bytes and a function that returns it, into an existing directory: one file if all
    fit into `shard_bytes`, else several and their index. One shard is held in memory at a time."""
    sizes, make = {}, {}
    for name, size, call in tensors:
        sizes[name], make[name] = size, call
    files = files_of(sizes, shard_bytes)
    for file, names in files.items():
        held = {name: make[name]() for name in names}
        save_file(held, directory / file, metadata={"format": "pt"})
        del held
    write_index(directory, files, sizes)


def write_as_they_come(directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Writes tensors as `write_shards` does, where no size is known before a tensor is there."""
    files: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    held: dict[str, Tensor] = {}

    def write(file: str) -> None:
        save_file(held, directory / file, metadata={"format": "pt"})
        files[file] = list(held)
        held.clear()

    for name, tensor in tensors:
        if held and sum(sizes[one] for one in held) + tensor.nbytes > shard_bytes:
            write(f"model-{len(files) + 1:05}.safetensors")
        held[name], sizes[name] = tensor, tensor.nbytes
    write(f"model-{len(files) + 1:05}.safetensors" if files else SINGLE)
    write_index(directory, files, sizes)


def files_of(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Distributes tensors over files, in order: returns the tensors' names by file. A file has at most `shard_bytes`, or a single
    larger tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if filled and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": names for number, names in enumerate(shards, 1)}


def write_index(directory: Path, files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> None:
    """Writes the index of a checkpoint with several files; writes nothing for a single file."""
    if len(files) == 1:
        return
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
