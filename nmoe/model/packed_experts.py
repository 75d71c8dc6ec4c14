"""Experts held in few bits, and dequantised one by one for each product: in MXFP4, as a released gpt-oss stores them, or in FP8 or
NVFP4, quantised while they are loaded.

The profiles define the numbers of FP8 and NVFP4 (`nmoe.model.expert_profile`), and no product sees others. Packed experts
have no parameters, so they are frozen; a gradient passes through them to their inputs, and dequantises them again.
"""

# Shapes: E experts, D inputs, N outputs, G blocks of inputs that share a scale, W bytes of a block, H pairs of inputs.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from nmoe.model import mxfp4
from nmoe.model.expert_profile import BLOCK, fp8, in_pairs, nvfp4
from nmoe.types import PackedForm


class PackedExperts(nn.Module, ABC):
    """One projection of a layer's experts, `[E, D, N]` (`shape`), in buffers of few bits."""

    form: ClassVar[PackedForm]

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = (experts, inputs, outputs)

    @contextmanager
    def to_fill(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields a temporary whole weight to load into, whose experts are quantised at the end of the `with` block."""
        device = next(self.buffers()).device
        whole_EDN = torch.empty(self.shape, dtype=dtype, device=device)
        yield whole_EDN
        for expert, weight_DN in enumerate(whole_EDN):
            self.put(expert, weight_DN)

    @abstractmethod
    def put(self, expert: int, weight_DN: Tensor) -> None:
        """Quantises one expert's weight into this projection."""

    @abstractmethod
    def _dequantised(self, expert: int) -> Tensor:
        """Returns one expert's numbers, `[D, N]`, in a dtype that holds them as their profile defines them."""

    def one(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Dequantises one expert to `[D, N]`, in the layout of a dequantised model, so that products have its bits."""
        return self._dequantised(expert).to(dtype).contiguous()

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Dequantises all experts to `[E, D, N]`."""
        return torch.stack([self.one(expert, dtype) for expert in range(self.shape[0])])


class MXFP4Experts(PackedExperts):
    """17/32 bytes a number."""

    form = "mxfp4"

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__(experts, inputs, outputs)
        shape = (experts, outputs, inputs // mxfp4.BLOCK)
        self.register_buffer("blocks", torch.empty(*shape, mxfp4.BLOCK // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(shape, dtype=torch.uint8))
        self.blocks: Tensor
        self.scales: Tensor

    def put(self, expert: int, weight_DN: Tensor) -> None:
        raise NotImplementedError("MXFP4 is read as it is stored")

    def _dequantised(self, expert: int) -> Tensor:
        only = slice(expert, expert + 1)
        return mxfp4.dequantised(self.blocks[only], self.scales[only])[0]


# The numbers of all bytes.
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


class FP8Experts(PackedExperts):
    """One byte a number, and four for each output."""

    form = "fp8"

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__(experts, inputs, outputs)
        self.register_buffer("codes", torch.empty(experts, inputs, outputs, dtype=torch.float8_e4m3fn))
        self.register_buffer("scales", torch.empty(experts, 1, outputs))
        self.codes: Tensor
        self.scales: Tensor

    def put(self, expert: int, weight_DN: Tensor) -> None:
        codes_DN, scale_1N = fp8(weight_DN, 0)
        self.codes[expert].copy_(codes_DN)
        self.scales[expert].copy_(scale_1N)

    def _dequantised(self, expert: int) -> Tensor:
        codes_DN = self.codes[expert]
        if codes_DN.device.type != "cpu":
            return codes_DN.float().mul_(self.scales[expert])
        # torch converts FP8 number by number on a CPU: 14 ms for 2048 x 1536, where looking them up takes 3.
        numbers = _E4M3.index_select(0, codes_DN.view(torch.uint8).flatten().int())
        return numbers.view(codes_DN.shape).mul_(self.scales[expert])


class NVFP4Experts(PackedExperts):
    """9/16 bytes a number, and four for each expert."""

    form = "nvfp4"

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__(experts, inputs, outputs)
        self.register_buffer("pairs", torch.empty(experts, outputs, inputs // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(experts, outputs, inputs // BLOCK, dtype=torch.float8_e4m3fn))
        self.register_buffer("factors", torch.empty(experts, 1))
        self.pairs: Tensor
        self.scales: Tensor
        self.factors: Tensor

    def put(self, expert: int, weight_DN: Tensor) -> None:
        codes_ND, scales_NG, factor = nvfp4(weight_DN.t(), weight_DN.abs().amax())
        self.pairs[expert].copy_(in_pairs(codes_ND))
        self.scales[expert].copy_(scales_NG)
        self.factors[expert].copy_(factor)

    def _dequantised(self, expert: int) -> Tensor:
        numbers_ND = mxfp4.from_pairs(self.pairs[expert], torch.float32)
        scales_NG = self.scales[expert].float() / self.factors[expert]
        return numbers_ND.unflatten(1, (-1, BLOCK)).mul_(scales_NG.unsqueeze(-1)).flatten(1).t()


FORMS = {one.form: one for one in (MXFP4Experts, FP8Experts, NVFP4Experts)}
