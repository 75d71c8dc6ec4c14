"""FP8 storage as DeepSeek released it: E4M3 and one factor for each 128 x 128 of a weight."""

# Shapes: N a product's outputs, D its inputs.

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.families.base import Packing
from nmoe.model.families.settings import Settings

# Rows and columns that share a scale.
_BLOCK = 128


def check(settings: Settings) -> None:
    """Raises UserError for blocks of another size."""
    settings.section("quantization_config").only("weight_block_size", [_BLOCK, _BLOCK])


def dequantised(weight_ND: Tensor, scales: Tensor) -> Tensor:
    """A weight `[N, D]` in fp32 from FP8 (E4M3) and one factor for each 128 x 128 of it; the last blocks may be cut off.

    Raises UserError if the two do not match.
    """
    wanted = tuple(-(-size // _BLOCK) for size in weight_ND.shape)
    if weight_ND.dtype != torch.float8_e4m3fn or weight_ND.dim() != 2 or scales.shape != wanted:
        raise UserError(
            f"{weight_ND.dtype} {list(weight_ND.shape)} with weight_scale_inv {list(scales.shape)} is not FP8 in blocks of "
            f"{_BLOCK} x {_BLOCK}"
        )
    out_ND = weight_ND.float()
    for first, row in zip(range(0, weight_ND.shape[0], _BLOCK), scales.float(), strict=True):
        out_ND[first : first + _BLOCK] *= row.repeat_interleave(_BLOCK)[: weight_ND.shape[1]]
    return out_ND


PACKING = Packing(("", "_scale_inv"), dequantised)
