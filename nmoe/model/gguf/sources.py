"""Makes Hugging Face tensors from the tensors of a GGUF file.

Values are read as stored, or dequantised by the `gguf` library, as many rows at a time as are asked for. llama.cpp changes some
tensors, which is undone here: rows of queries and keys in Llama's heads are in another order, one is added to Gemma's norm weights,
and gate and up of gpt-oss are two tensors (`convert_hf_to_gguf.py` of llama.cpp).
"""

# Shapes: E experts, N a product's outputs, G blocks of 32 numbers, W bytes of a block.

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.gguf_file import GGUFFile, StoredTensor

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def kind_of(stored: StoredTensor, file: GGUFFile) -> str:
    """Returns the name of a stored tensor's type, such as Q4_1. Raises UserError for a type that the `gguf` library does not
    read."""
    name, read = _kind(stored.kind)
    if not read:
        raise UserError(
            f"{file.path}: {stored.name} is of type {name}, which is not read; use a file in Q8_0, Q4_K_M or BF16"
        )
    return name


@cache
def _kind(number: int) -> tuple[str, bool]:
    """Returns the name of the ggml type with this number, and whether the `gguf` library can read it."""
    from gguf import GGMLQuantizationType
    from gguf.quants import _type_traits

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return f"number {number}", False
    return kind.name, kind in _type_traits or kind.name in FLOATS


def row_bytes(stored: StoredTensor, file: GGUFFile) -> int:
    """Returns the size in bytes of one row of the first axis. Raises UserError if rows do not consist of whole quantisation
    blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = kind_of(stored, file)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if not stored.shape or stored.shape[-1] % block:
        raise UserError(
            f"{file.path}: {stored.name} of shape {list(stored.shape)} is not made of whole blocks of {kind}"
        )
    return math.prod(stored.shape[1:]) * size // block if len(stored.shape) > 1 else size // block


def check_extent(stored: StoredTensor, file: GGUFFile) -> None:
    """Raises UserError for a tensor of a type that nmoe does not read, or that ends behind the end of the file."""
    end = stored.offset + stored.shape[0] * row_bytes(stored, file) if stored.shape else stored.offset
    if end > file.size:
        raise UserError(
            f"{file.path}: torn: {stored.name} ends at byte {end}, and the file has {file.size}; fetch it again"
        )


def part_of(stored: StoredTensor, index: int, file: GGUFFile) -> StoredTensor:
    """Returns one of several tensors that are stacked on a first axis, such as the weights of one expert."""
    return replace(stored, shape=stored.shape[1:], offset=stored.offset + index * row_bytes(stored, file))


def read_bytes(stored: StoredTensor, file: GGUFFile, first: int, last: int) -> bytearray:
    """Reads the bytes of rows `first` to `last` (exclusive) of the first axis. Raises UserError if the file no longer has them."""
    row = row_bytes(stored, file)
    data = bytearray((last - first) * row)
    try:
        with file.path.open("rb") as opened:
            opened.seek(stored.offset + first * row)
            found = opened.readinto(data)
    except OSError as error:
        raise UserError(f"{file.path}: {stored.name} cannot be read: {error.strerror}") from None
    if found != len(data):
        raise UserError(f"{file.path}: torn: {stored.name} is cut; fetch the file again")
    return data


def read_rows(stored: StoredTensor, file: GGUFFile, first: int, last: int) -> Tensor:
    """Reads rows `first` to `last` (exclusive) of the first axis: as stored, or dequantised to fp32."""
    kind, data = kind_of(stored, file), read_bytes(stored, file, first, last)
    shape = (last - first, *stored.shape[1:])
    if kind in FLOATS:
        return torch.frombuffer(data, dtype=FLOATS[kind]).view(shape)
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    rows = np.frombuffer(data, np.uint8).reshape(math.prod(shape[:-1]), -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind])).view(shape)


class Source(Protocol):
    """One Hugging Face tensor, and how to make it from a GGUF file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the Hugging Face tensor."""

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The tensors of the GGUF file that it is made from."""

    @property
    def packed(self) -> bool:
        """Whether the values are the bytes of a quantised form."""

    def rows(self, file: GGUFFile, first: int, last: int) -> Tensor:
        """Reads rows `first` to `last` (exclusive) of the first axis."""


@dataclass(frozen=True)
class Whole:
    """One stored tensor unchanged, or with `offset` added to each value."""

    tensor: StoredTensor
    offset: float = 0.0
    packed = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        return (self.tensor,)

    def rows(self, file: GGUFFile, first: int, last: int) -> Tensor:
        values = read_rows(self.tensor, file, first, last)
        return values + self.offset if self.offset else values


@dataclass(frozen=True)
class Turned(Whole):
    """A tensor whose rows belong to heads, in Hugging Face's order: each head's first half, then its second half. llama.cpp
    interleaves the two halves."""

    heads: int = 1

    def rows(self, file: GGUFFile, first: int, last: int) -> Tensor:
        # Whole heads, of which a part may have been asked for.
        size = self.shape[0] // self.heads
        above, below = first // size * size, -(-last // size) * size
        pairs = super().rows(file, above, below).unflatten(0, (-1, size // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)[first - above : last - above]


@dataclass(frozen=True)
class Experts:
    """gpt-oss' experts in the layout of its release: weights `[E, inputs, N]` and biases `[E, N]`. If `stored` is gate and up,
    these alternate among the outputs."""

    stored: tuple[StoredTensor, ...]
    packed = False

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, *inputs = self.stored[0].shape
        return (experts, *inputs, outputs * len(self.stored))

    def rows(self, file: GGUFFile, first: int, last: int) -> Tensor:
        joined = torch.stack([read_rows(one, file, first, last) for one in self.stored], 2).flatten(1, 2)
        return joined.transpose(1, 2) if joined.dim() == 3 else joined


@dataclass(frozen=True)
class PackedExperts:
    """gpt-oss' experts in MXFP4 in the layout of its release: blocks `[E, N, G, 16]`, or with `scales` their scales `[E, N, G]`.

    llama.cpp stores a block as its scale and 16 bytes, whose lower halves are the numbers 0 to 15 and whose upper halves are 16 to
    31; in the release two neighbouring numbers share a byte.
    """

    stored: tuple[StoredTensor, ...]
    scales: bool
    packed = True

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, inputs = self.stored[0].shape
        groups = (experts, outputs * len(self.stored), inputs // 32)
        return groups if self.scales else (*groups, 16)

    def rows(self, file: GGUFFile, first: int, last: int) -> Tensor:
        parts = [torch.frombuffer(read_bytes(one, file, first, last), dtype=torch.uint8) for one in self.stored]
        _, outputs, inputs = self.stored[0].shape
        blocks_ENGW = torch.stack([one.view(last - first, outputs, inputs // 32, 17) for one in parts], 2).flatten(1, 2)
        if self.scales:
            return blocks_ENGW[..., 0].contiguous()
        numbers = torch.cat([blocks_ENGW[..., 1:] & 0x0F, blocks_ENGW[..., 1:] >> 4], -1)
        return numbers[..., 0::2] | numbers[..., 1::2] << 4
