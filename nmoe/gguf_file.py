"""Reads the header of a GGUF file, llama.cpp's format: metadata and the position of each tensor, but not the tensors' values.

Format: gguf.md of the repository ggml-org/ggml (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from nmoe.errors import MissingInputError, UserError, shown

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 8

# The format's codes of types, and the codes of `struct`.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """The description of a tensor in a file: `StoredTensor("blk.0.attn_q.weight", (576, 576), 3, 57083232)`, where 3 is
    type Q4_1."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch; the file has them in the opposite order
    kind: int  # ggml's number of the type
    offset: int  # of its first byte in the file


_NEEDED: Any = object()


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file: its metadata, and the descriptions of its tensors by name."""

    path: Path
    size: int
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Returns a value of the metadata, or `default` if the key is absent. Raises UserError if the value is not of
        type `kind`."""
        value = self.metadata.get(key, default)
        if key in self.metadata and (not isinstance(value, kind) or (isinstance(value, bool) and kind is int)):
            raise UserError(f"{self.path}: {key} = {shown(value)} is not of the type that belongs there")
        return value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Returns a required value of the metadata. Raises UserError if it is absent or not of type `kind`."""
        if key not in self.metadata:
            raise UserError(f"{self.path}: the file lacks {key}; it is not a whole language model")
        return self.get(key, kind)

    def own(self, key: str, kind: type, default: Any = _NEEDED) -> Any:
        """Returns a value of the metadata whose key begins with the architecture, such as `llama.block_count` for
        `block_count`.

        Raises UserError if it is not of type `kind`, and if it is absent and there is no default.
        """
        name = f"{self.architecture}.{key}"
        return self.need(name, kind) if default is _NEEDED else self.get(name, kind, default)

    def own_real(self, key: str, default: Any = _NEEDED) -> Any:
        """Returns a number like `own`, as it was before it was rounded to fp32: 1e-05 and not 9.999999747378752e-06."""
        value = self.own(key, float, default)
        return value if value is None else float(f"{value:.7g}")

    @property
    def architecture(self) -> str:
        """The architecture of the model, such as "llama" or "qwen3moe", with which the keys of its settings begin."""
        return str(self.need("general.architecture", str))


def is_gguf(path: Path) -> bool:
    """Returns whether a path is a GGUF file, which every command accepts as a checkpoint."""
    return path.suffix == SUFFIX and path.is_file()


def read_header(path: Path) -> GGUFFile:
    """Reads the header of a GGUF file. The last few headers are cached, because a model and its tokenizer are read separately.

    Raises UserError if the file is incomplete, has another format, or a version that is not supported.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise MissingInputError(f"{path}: cannot be read: {error.strerror}", str(path)) from None
    return _header(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4)
def _header(path: Path, _changed: int, size: int) -> GGUFFile:
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise UserError(f"{path}: not a GGUF file: it does not begin with the letters GGUF; fetch it again")
            with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                return _Reader(path, content).header(size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


class _Reader:
    """Reads one value after another from a file's bytes, and raises UserError at the end of the file."""

    def __init__(self, path: Path, content: mmap) -> None:
        self.path, self.content, self.at = path, content, len(_MAGIC)

    def header(self, size: int) -> GGUFFile:
        version = self.scalar("I")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise UserError(
                    f"{self.path}: a big-endian GGUF file, which is not read; convert it with gguf-convert-endian"
                )
            raise UserError(f"{self.path}: GGUF version {version} is not read, only 2 and 3; convert the model again")
        tensor_count, key_count = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(key_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        if metadata.get("split.count", 1) != 1:
            raise UserError(
                f"{self.path}: one of {metadata['split.count']} parts of a model; join them with llama-gguf-split --merge"
            )
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise UserError(f"{self.path}: general.alignment = {shown(alignment)} is not a number of bytes")
        relative = [self.tensor() for _ in range(tensor_count)]
        first = -(-self.at // alignment) * alignment
        tensors = {one.name: StoredTensor(one.name, one.shape, one.kind, first + one.offset) for one in relative}
        if len(tensors) != len(relative):
            raise UserError(f"{self.path}: two of its tensors have one name; fetch the file again")
        return GGUFFile(self.path, size, metadata, tensors)

    def tensor(self) -> StoredTensor:
        name, dimensions = self.string(), self.scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise self.torn(f"tensor {shown(name)} with {dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        return StoredTensor(name, shape, self.scalar("I"), self.scalar("Q"))

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.torn(f"a value of type {kind}")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            code = f"<{self.bounded(count)}{_SCALARS[inner]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code))))
        read: Callable[[], Any] = self.string if inner == _STRING else lambda: self.value(inner)
        if inner == _ARRAY:
            raise self.torn("an array of arrays")
        return [read() for _ in range(self.bounded(count))]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.content):
            raise self.torn(f"{count} bytes")
        taken, self.at = self.content[self.at : end], end
        return taken

    def bounded(self, count: int) -> int:
        """Returns `count`, a number of values of at least one byte each. Raises UserError if the rest of the file is
        too short for them."""
        if count > len(self.content) - self.at:
            raise self.torn(f"{count} values")
        return count

    def torn(self, what: str) -> UserError:
        return UserError(
            f"{self.path}: torn: its header asks for {what} at byte {self.at}, and the file has {len(self.content)}; fetch it again"
        )
