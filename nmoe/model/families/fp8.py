"""Reads weights stored in FP8: E4M3 with one factor for each 128 x 128 of a weight (DeepSeek's, Qwen's and Moonshot's releases),
or, as compressed-tensors writes it, also for each row or for the whole weight. Also reads compressed-tensors' NVFP4.

Weights are dequantised in fp32, which holds the product of number and factor exactly if the factor has at most 20 bits, as factors
in bf16 have; then they are rounded once, to the model's dtype.
"""

# Shapes: N a product's outputs, D its inputs.

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.expert_profile import BLOCK
from nmoe.model.families.base import Packing
from nmoe.model.families.compressed import NVFP4, from_packed
from nmoe.model.families.settings import Settings

# Rows and columns that share a scale.
_BLOCK = 128


def check(settings: Settings) -> None:
    """Raises UserError if the `quantization_config` describes a storage that nmoe does not read. Settings for activations are
    ignored, because activations are not quantised here."""
    settings.refuse_quantised("fp8", "compressed-tensors")
    quantised = settings.section("quantization_config")
    if quantised.raw.get("quant_method") != "compressed-tensors":
        quantised.only("fmt", "e4m3")
        quantised.only("weight_block_size", [_BLOCK, _BLOCK])
        return
    quantised.only("format", "float-quantized", NVFP4)
    groups = quantised.section("config_groups")
    for name in groups.raw:
        weights = groups.section(name).section("weights")
        weights.only("type", "float")
        if quantised.raw.get("format") == NVFP4:
            weights.only("num_bits", 4)
            weights.only("symmetric", True)
            weights.only("strategy", "tensor_group")
            weights.only("group_size", BLOCK)
            continue
        weights.only("num_bits", 8)
        weights.only("symmetric", True)
        weights.only("strategy", "tensor", "channel", "block")
        weights.only("block_structure", [_BLOCK, _BLOCK])


def by_block(weight_ND: Tensor, scales: Tensor) -> Tensor:
    """Dequantises an FP8 (E4M3) weight `[N, D]` to fp32, with one factor for each 128 x 128 block; the last blocks may be cut off.

    Raises UserError if weight and factors do not match.
    """
    _check_dtype(weight_ND)
    if scales.shape != tuple(-(-size // _BLOCK) for size in weight_ND.shape):
        raise UserError(
            f"scales {list(scales.shape)} are not one for each {_BLOCK} x {_BLOCK} of {list(weight_ND.shape)}"
        )
    out_ND = weight_ND.float()
    for first, row in zip(range(0, weight_ND.shape[0], _BLOCK), scales.float(), strict=True):
        out_ND[first : first + _BLOCK] *= row.repeat_interleave(_BLOCK)[: weight_ND.shape[1]]
    return out_ND


def by_row(weight_ND: Tensor, scales: Tensor) -> Tensor:
    """Dequantises an FP8 (E4M3) weight to fp32, with one factor for each row, `[N, 1]`, or for the whole weight, `[1]`, or for each
    128 x 128 block. Raises UserError if weight and factors do not match."""
    _check_dtype(weight_ND)
    if scales.numel() != 1 and scales.shape != (len(weight_ND), 1):
        return by_block(weight_ND, scales)
    return weight_ND.float().mul_(scales.float() if scales.numel() > 1 else scales.float().view(()))


def _check_dtype(weight_ND: Tensor) -> None:
    if weight_ND.dtype != torch.float8_e4m3fn or weight_ND.dim() != 2:
        raise UserError(f"{weight_ND.dtype} {list(weight_ND.shape)} beside scales is not a matrix in FP8 (E4M3)")


PACKINGS: tuple[Packing, ...] = (
    Packing(("", "_scale_inv"), by_block),
    Packing(("", "_scale"), by_row),
    Packing(("_packed", "_scale", "_global_scale"), from_packed),
)
