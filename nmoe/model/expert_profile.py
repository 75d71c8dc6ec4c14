"""Quantisation profiles of routed experts: how their weights, and the activation rows that they multiply, are rounded to few bits.

A profile is defined by its reference: quantise, dequantise, then multiply as without a profile. The reference runs on every device,
in sampling as in training; a kernel that multiplies quantised numbers has to agree with it. The parameters stay in the run's
precision, and the optimizer steps them: the gradient passes the rounding as if it were not there (straight-through, Bengio et al.
2013, arXiv:1308.3432).

- bf16: weights and rows rounded to bf16, without scales. In a run in bf16 it changes nothing.
- fp8: E4M3 and a scale in fp32 of amax / 448 for each row and for each output of a weight (compressed-tensors' FP8_DYNAMIC).
- nvfp4: only weights, E2M1 in blocks of 16 inputs with a scale in E4M3 each, and one scale in fp32 of amax / (6 * 448) for an
  expert's gate and up together, and one for its down (compressed-tensors' NVFP4A16).
"""

# Shapes: E experts, D inputs, N outputs, R rows, G blocks of 16 inputs.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nmoe.config.tables.model import ExpertProfile
from nmoe.errors import UserError
from nmoe.model.mxfp4 import E2M1

BLOCK = 16
_LARGEST_E4M3, _LARGEST_E2M1 = 448.0, 6.0
# Keeps scales normal numbers: smaller ones become 0.
_SMALLEST_SCALE, _SMALLEST_AMAX = 2.0**-126, 2.0**-100

# What separates the magnitudes of E2M1. Of a number halfway the one whose code is even is taken (IEEE 754's rule).
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def fp8(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Quantises to E4M3: returns the codes and fp32 scales. Numbers along `axis` share a scale; the scales keep that axis with size
    1."""
    wide = x.float()
    scale = (wide.abs().amax(axis, keepdim=True) / _LARGEST_E4M3).clamp_min(_SMALLEST_SCALE)
    return (wide / scale).to(torch.float8_e4m3fn), scale


def nvfp4(weight_ND: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises to NVFP4: returns E2M1 codes `[N, D]` as bytes (sign in bit 3), the blocks' scales `[N, G]` in E4M3, and the factor
    `[1]` in fp32 that divides the scales, 6 * 448 / amax. `amax` is the largest magnitude of all numbers that share the factor. D
    is a multiple of 16."""
    blocks_NGW = weight_ND.float().unflatten(-1, (-1, BLOCK))
    factor = (_LARGEST_E2M1 * _LARGEST_E4M3 / amax.float().clamp_min(_SMALLEST_AMAX)).reshape(1)
    scales_NG = (blocks_NGW.abs().amax(-1) / _LARGEST_E2M1 * factor).to(torch.float8_e4m3fn)
    # A block whose scale is 0, far below the rest, becomes 0.
    divisors_NG1 = (scales_NG.float() / factor).unsqueeze(-1)
    scaled_NGW = torch.where(divisors_NG1 > 0, blocks_NGW / divisors_NG1, 0.0)
    magnitudes = scaled_NGW.abs()
    codes = torch.zeros_like(magnitudes, dtype=torch.uint8)
    for code, halfway in enumerate(_HALFWAY):
        # Up to the even code above from halfway on, but to the odd one only from beyond it.
        codes += magnitudes >= halfway if code % 2 else magnitudes > halfway
    return (codes + 8 * (scaled_NGW < 0).to(torch.uint8)).flatten(-2), scales_NG, factor


def in_pairs(codes_ND: Tensor) -> Tensor:
    """Puts two codes of four bits into each byte, the lower bits first."""
    low_NH, high_NH = codes_ND.unflatten(-1, (-1, 2)).unbind(-1)
    return low_NH | high_NH << 4


def from_nvfp4(codes_ND: Tensor, scales_NG: Tensor, factor: Tensor) -> Tensor:
    """Dequantises codes, scales and factor as `nvfp4` returns them to `[N, D]` in fp32."""
    values = torch.tensor(E2M1, device=codes_ND.device)
    blocks_NGW = values[codes_ND.int()].unflatten(-1, (-1, BLOCK))
    return (blocks_NGW * (scales_NG.float() / factor).unsqueeze(-1)).flatten(-2)


def dequantised(weight_DN: Tensor, profile: ExpertProfile) -> Tensor:
    """Quantises one expert's projection `[D, N]` by the profile and returns the dequantised result."""
    if profile == "bf16":
        return weight_DN.bfloat16()
    if profile == "fp8":
        codes_DN, scale_1N = fp8(weight_DN, 0)
        return codes_DN.float() * scale_1N
    return from_nvfp4(*nvfp4(weight_DN.t(), weight_DN.abs().amax())).t()


class _StraightThrough(torch.autograd.Function):
    """Returns the quantised numbers in the forward pass, and passes their gradient to the original numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantised: Tensor) -> Tensor:
        return quantised.view_as(quantised)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, quantised: Tensor) -> Tensor:
    """Returns `quantised`, whose gradient goes to `x` (straight-through estimator)."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return quantised
    out: Tensor = _StraightThrough.apply(x, quantised)
    return out


class ProfiledExperts:
    """Quantises the experts of one layer by a profile. A weight is quantised once per change, however many passes of sampling and
    training read it, and the dequantised result is kept beside it, in the weight's dtype.

    Changes in place are noticed by the tensor's version, except a fused optimizer's: after its step call `expire`.
    """

    def __init__(self, profile: ExpertProfile) -> None:
        self.profile = profile
        self._kept: dict[str, _Kept] = {}

    def expire(self) -> None:
        """Marks every weight to be quantised again when it is next used."""
        for kept in self._kept.values():
            kept.of = None

    def changes(self, dtype: torch.dtype) -> bool:
        """Returns whether the profile changes the results of experts in this dtype."""
        return self.profile != "bf16" or dtype != torch.bfloat16

    @property
    def rounds_rows(self) -> bool:
        """Whether the profile also quantises activation rows, not only weights."""
        return self.profile != "nvfp4"

    def rows(self, x_RD: Tensor) -> Tensor:
        """Rounds activation rows `[R, D]` as the profile does before a product."""
        if self.profile == "bf16":
            return straight_through(x_RD, x_RD.detach().bfloat16().to(x_RD.dtype))
        codes_RD, scale_R1 = fp8(x_RD.detach(), -1)
        return straight_through(x_RD, (codes_RD.float() * scale_R1).to(x_RD.dtype))

    def weight(self, name: str, weight_EDN: nn.Parameter) -> Tensor:
        """Returns a weight after quantisation and dequantisation, `[E, D, N]`, from the kept copy if the weight has not changed. A
        weight made under `inference_mode` counts no changes and is quantised in each call. Raises UserError for NaN and infinite
        weights."""
        kept = self._kept.get(name)
        state = (weight_EDN.data_ptr(), -1 if weight_EDN.is_inference() else weight_EDN._version)
        if kept is None or kept.state != state or kept.of is not weight_EDN or weight_EDN.is_inference():
            kept = self._kept[name] = _Kept(weight_EDN, state, self._quantised(weight_EDN, kept))
        return straight_through(weight_EDN, kept.value)

    def weight_once(self, weight_EDN: Tensor) -> Tensor:
        """Quantises and dequantises a weight that was gathered from ranks for one pass, without keeping the result. A gathered
        weight has the same address and version in each pass, so a change cannot be noticed, and keeping all would undo the
        sharding."""
        return straight_through(weight_EDN, self._quantised(weight_EDN, None).data)

    def _quantised(self, weight_EDN: Tensor, before: _Kept | None) -> nn.Parameter:
        """Returns the quantised weight as a parameter, because packed forms are kept only of parameters. Reuses the memory of the
        result `before`, which a recorded decode step reads. Raises UserError for NaN and infinite weights."""
        with torch.inference_mode(False), torch.no_grad():
            out = None if before is None else before.value
            if out is None or (out.shape, out.dtype, out.device) != (
                weight_EDN.shape,
                weight_EDN.dtype,
                weight_EDN.device,
            ):
                out = nn.Parameter(torch.empty_like(weight_EDN), requires_grad=False)
            if not all(bool(bound.isfinite()) for bound in torch.aminmax(weight_EDN)):
                raise UserError(f"NaN or infinite weights of experts have no {self.profile}")
            # One expert at a time, because what lies between takes several times its memory.
            for expert, weight_DN in enumerate(weight_EDN):
                out[expert].copy_(dequantised(weight_DN, self.profile))
            return out


class _Kept:
    """A quantised weight; the parameter that it was made from (None once that has changed), and that parameter's address and
    version then."""

    def __init__(self, of: nn.Parameter, state: tuple[int, int], value: nn.Parameter) -> None:
        self.of: nn.Parameter | None = of
        self.state, self.value = state, value
