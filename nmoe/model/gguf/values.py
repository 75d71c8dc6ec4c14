"""The values of a GGUF file's tensors: as stored, or dequantised by the `gguf` library, as many rows at a time as are asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.gguf_file import GGUFFile, StoredTensor

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def kind_of(stored: StoredTensor, file: GGUFFile) -> str:
    """The name of a tensor's type, such as Q4_1. Raises UserError for one that the library does not read."""
    name, read = _kind(stored.kind)
    if not read:
        raise UserError(
            f"{file.path}: {stored.name} is of type {name}, which is not read; use a file in Q8_0, Q4_K_M or BF16"
        )
    return name


@cache
def _kind(number: int) -> tuple[str, bool]:
    """The name of a type, and whether it is read."""
    from gguf import GGMLQuantizationType
    from gguf.quants import _type_traits

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return f"number {number}", False
    return kind.name, kind in _type_traits or kind.name in FLOATS


def row_bytes(stored: StoredTensor, file: GGUFFile) -> int:
    """The size of a row of the first axis. Raises UserError where its values are no whole blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = kind_of(stored, file)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if not stored.shape or stored.shape[-1] % block:
        raise UserError(
            f"{file.path}: {stored.name} of shape {list(stored.shape)} is not made of whole blocks of {kind}"
        )
    return math.prod(stored.shape[1:]) * size // block if len(stored.shape) > 1 else size // block


def check_extent(stored: StoredTensor, file: GGUFFile) -> None:
    """Raises UserError for a tensor that is of a type not read, or that ends behind the end of its file."""
    end = stored.offset + stored.shape[0] * row_bytes(stored, file) if stored.shape else stored.offset
    if end > file.size:
        raise UserError(
            f"{file.path}: torn: {stored.name} ends at byte {end}, and the file has {file.size}; fetch it again"
        )


def part_of(stored: StoredTensor, index: int, file: GGUFFile) -> StoredTensor:
    """One of the tensors that are stacked on a first axis, such as an expert's."""
    return replace(stored, shape=stored.shape[1:], offset=stored.offset + index * row_bytes(stored, file))


def read_bytes(stored: StoredTensor, file: GGUFFile, first: int, last: int) -> bytearray:
    """The bytes of rows of the first axis. Raises UserError where the file has them no longer."""
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
    """Rows of the first axis: as stored, or dequantised to fp32."""
    kind, data = kind_of(stored, file), read_bytes(stored, file, first, last)
    shape = (last - first, *stored.shape[1:])
    if kind in FLOATS:
        return torch.frombuffer(data, dtype=FLOATS[kind]).view(shape)
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    rows = np.frombuffer(data, np.uint8).reshape(math.prod(shape[:-1]), -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind])).view(shape)
