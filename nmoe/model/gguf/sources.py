"""Where a Hugging Face tensor comes from: a tensor of the file, and what undoes llama.cpp's way of storing it.

Rows of queries and keys in Llama's heads are in another order, norms of Gemma have the one added that they scale by, and gate and
up of gpt-oss are two tensors (`convert_hf_to_gguf.py` of llama.cpp).
"""

# Shapes: E experts, N a product's outputs, G blocks of 32 numbers, W bytes of a block.

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nmoe.gguf_file import GGUFFile, StoredTensor
from nmoe.model.gguf.values import read_bytes, read_rows


class Source(Protocol):
    """One Hugging Face tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The tensors of the file that it is made of."""

    @property
    def packed(self) -> bool:
        """Whether it is bytes of a quantised form."""

    def rows(self, file: GGUFFile, first: int, last: int) -> Tensor:
        """Its rows of the first axis."""


@dataclass(frozen=True)
class Whole:
    """A tensor as it is, with `offset` added to each value."""

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
    """Rows of heads: llama.cpp puts row i of a head's first half before row i of its second, and here the halves follow another."""

    heads: int = 1

    def rows(self, file: GGUFFile, first: int, last: int) -> Tensor:
        # Whole heads, of which a part may have been asked for.
        size = self.shape[0] // self.heads
        above, below = first // size * size, -(-last // size) * size
        pairs = super().rows(file, above, below).unflatten(0, (-1, size // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)[first - above : last - above]


@dataclass(frozen=True)
class Experts:
    """gpt-oss' experts as its release has them: weights `[E, inputs, N]` and biases `[E, N]`; gate and up, where these are the two
    parts, take turns among the outputs."""

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
    """gpt-oss' experts in MXFP4 as its release has them: blocks `[E, N, G, 16]`, or their scales `[E, N, G]`.

    A stored block is its scale and 16 bytes, where the numbers 0 to 15 are the lower halves and 16 to 31 the upper ones; in the
    release two that follow another share a byte.
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
