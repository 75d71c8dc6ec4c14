"""Stores routed experts quantised by their profile in compressed-tensors' format for export, and reads NVFP4 in that format from
any checkpoint.

Only routed experts are quantised. fp8 is `float-quantized` with a scale for each row of a weight, and servers quantise the
activations of each token (FP8_DYNAMIC). nvfp4 is `nvfp4-pack-quantized` with only weights quantised (NVFP4A16). With the profile
bf16 experts are stored in bf16, which only their dtype shows.
"""

# Shapes: N a product's outputs, D its inputs, G blocks of 16 inputs, H pairs of inputs.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nmoe.config.tables.model import ExpertProfile
from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.expert_profile import BLOCK, fp8, from_nvfp4, in_pairs, nvfp4
from nmoe.model.families.base import TIED_HEAD, Entry, Family, Written, tensors_of

NVFP4 = "nvfp4-pack-quantized"

_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
_FP8_ROWS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
_NVFP4_WEIGHTS = _FP8_WEIGHTS | {
    "num_bits": 4,
    "strategy": "tensor_group",
    "group_size": BLOCK,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
}


def from_packed(packed_NH: Tensor, scales_NG: Tensor, factor: Tensor) -> Tensor:
    """Dequantises an NVFP4 weight `[N, D]` to fp32: a byte holds two numbers of four bits, the lower bits first; each 16 numbers
    have a scale in E4M3; `factor` divides the scales. Raises UserError if the three do not match."""
    rows, pairs = packed_NH.shape if packed_NH.dim() == 2 else (-1, -1)
    if packed_NH.dtype != torch.uint8 or scales_NG.dtype != torch.float8_e4m3fn or factor.numel() != 1:
        raise UserError(
            f"{packed_NH.dtype}, {scales_NG.dtype} and {list(factor.shape)} are not NVFP4: bytes, E4M3 and one factor"
        )
    if scales_NG.shape != (rows, 2 * pairs // BLOCK) or 2 * pairs % BLOCK:
        raise UserError(f"scales {list(scales_NG.shape)} are not one for each {BLOCK} of {[rows, 2 * pairs]}")
    codes_ND = torch.stack([packed_NH & 15, packed_NH >> 4], -1).flatten(1)
    return from_nvfp4(codes_ND, scales_NG, factor.float())


def refuse_stacked(family: Family, config: ModelConfig) -> None:
    """Raises UserError if the experts have a profile but the family stores a layer's experts in one tensor."""
    alone = all(
        entry.index and isinstance(entry.index[0], int) for entry in family.entries(config) if _is_expert(entry)
    )
    if config.expert_profile is not None and not alone:
        raise UserError(
            f"{family.MODEL_TYPE} stores the experts of a layer together, and experts in {config.expert_profile} are exported one "
            "by one; train without model.expert_profile where export to this family is wanted"
        )


def quantization_config(family: Family, config: ModelConfig) -> dict[str, Any] | None:
    """Returns the `quantization_config` of an export; None if the experts' profile needs none."""
    if config.expert_profile in (None, "bf16"):
        return None
    # Servers quantise every linear layer that is not named here.
    kept = [entry.theirs for entry in family.entries(config) if not _is_expert(entry) and len(entry.shape) == 2]
    if config.tie_embeddings:
        kept.append(TIED_HEAD)
    by_fp8 = config.expert_profile == "fp8"
    group = {
        "targets": ["Linear"],
        "weights": _FP8_WEIGHTS if by_fp8 else _NVFP4_WEIGHTS,
        "input_activations": _FP8_ROWS if by_fp8 else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if by_fp8 else NVFP4,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [name.removesuffix(".weight") for name in kept if "embed" not in name],
    }


def stored_tensors(
    state: dict[str, Tensor], family: Family, config: ModelConfig, gather: Callable[[str], Tensor] | None = None
) -> Iterator[Written]:
    """Yields a model's weights as the family's tensors, in the form of `tensors_of`, but with routed experts quantised by the
    model's profile."""
    assert config.expert_profile is not None, "without a profile there is nothing to quantise"
    whole = state.__getitem__ if gather is None else gather
    for entry in family.entries(config):
        if _is_expert(entry):
            yield from _expert(entry, whole, config.expert_profile)
        else:
            yield from tensors_of(state, [entry], gather)


def _is_expert(entry: Entry) -> bool:
    return entry.ours.endswith((".ffn.gate_up", ".ffn.down"))


def _expert(entry: Entry, whole: Callable[[str], Tensor], profile: ExpertProfile) -> Iterator[Written]:
    """Yields one expert's gate, up or down, quantised, and its scales, in the form of `tensors_of`. `whole` returns the weight of
    all experts by name."""
    name, rows, numbers = entry.theirs, entry.shape[0], entry.shape[0] * entry.shape[1]

    def made(make: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: make(entry.write(whole(entry.ours)[entry.index].detach())).cpu().contiguous()

    def as_fp8(weight_ND: Tensor) -> tuple[Tensor, Tensor]:
        return fp8(weight_ND, 1)

    def as_nvfp4(weight_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return nvfp4(weight_ND, whole(entry.ours)[entry.index[0]].detach().abs().amax())

    if profile == "bf16":
        yield name, 2 * numbers, made(Tensor.bfloat16)
    elif profile == "fp8":
        yield name, numbers, made(lambda weight_ND: as_fp8(weight_ND)[0])
        yield f"{name}_scale", 4 * rows, made(lambda weight_ND: as_fp8(weight_ND)[1])
    else:
        yield f"{name}_packed", numbers // 2, made(lambda weight_ND: in_pairs(as_nvfp4(weight_ND)[0]))
        yield f"{name}_scale", numbers // BLOCK, made(lambda weight_ND: as_nvfp4(weight_ND)[1])
        yield f"{name}_global_scale", 4, made(lambda weight_ND: as_nvfp4(weight_ND)[2])
