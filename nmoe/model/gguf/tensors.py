"""Gives access to a GGUF file's tensors under their Hugging Face names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmoe.gguf_file import read_header
from nmoe.model.gguf.architectures import architecture_of
from nmoe.model.gguf.rope_scaling import ROPE_FACTORS
from nmoe.model.gguf.sources import FLOATS, Source, Whole, check_extent, kind_of


def hf_config(path: Path) -> dict[str, Any]:
    """Returns the `config.json` of the Hugging Face checkpoint that a GGUF file was made from. Raises UserError for an architecture
    that nmoe does not read, and for a truncated file."""
    file = read_header(path)
    return architecture_of(file).config(file)


class GGUFTensors:
    """The tensors of a GGUF file, with the interface of `Shards`: names, shapes and types are read at once, values on request.

    Raises UserError, naming file and tensor, for a type that nmoe does not read and for a truncated file.
    """

    def __init__(self, path: Path) -> None:
        self._file = read_header(path)
        self.listing = path
        for stored in self._file.tensors.values():
            check_extent(stored, self._file)
        self._sources: dict[str, Source] = dict(architecture_of(self._file).sources(self._file))
        used = {stored.name for source in self._sources.values() for stored in source.stored} | {ROPE_FACTORS}
        # Under their own names, so that one that does not belong to the family is refused by it.
        self._sources |= {name: Whole(stored) for name, stored in self._file.tensors.items() if name not in used}
        self.files = dict.fromkeys(self._sources, path)
        self.shapes = {name: source.shape for name, source in self._sources.items()}

    @property
    def copied_dtype(self) -> torch.dtype:
        """The dtype of a safetensors copy of the file: bf16 if any weight is quantised or in bf16, else fp16 if any is in fp16,
        else fp32."""
        found = {self.dtype(name) for name in self.files}
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in found), torch.float32)

    @property
    def copied_bytes(self) -> int:
        """The size in bytes of a safetensors copy of the file, in `copied_dtype`."""
        size = self.copied_dtype.itemsize
        return sum(math.prod(self.shapes[name]) * (1 if self._sources[name].packed else size) for name in self.files)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype that a tensor is stored in: bf16 for a quantised one, uint8 for experts in MXFP4."""
        if self._sources[name].packed:
            return torch.uint8
        return FLOATS.get(self.dtype_name(name), torch.bfloat16)

    def dtype_name(self, name: str) -> str:
        """Returns the tensor's type as ggml names it, such as Q4_1."""
        return kind_of(self._sources[name].stored[0], self._file)

    def nbytes(self, name: str) -> int:
        """Returns a tensor's size in bytes in fp32, to which most are dequantised, or in MXFP4. `read` returns less for a tensor
        stored in bf16 or fp16."""
        return math.prod(self.shapes[name]) * (1 if self._sources[name].packed else 4)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Reads one tensor, or only these rows of its first axis: as stored, or dequantised to fp32 if quantised."""
        first, last, _ = (rows or slice(None)).indices(self.shapes[name][0])
        return self._sources[name].rows(self._file, first, last)
