"""The Triton kernels of `swiglu`: each way in one pass over memory, computed in fp32 and rounded once."""

# Shapes: N rows, F hidden units.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def _factors(raw_gate, raw_up, limit, LIMITED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gate, its sigmoid, and the other factor; their product is the activation."""
    if LIMITED:
        gate = tl.minimum(raw_gate, limit)
        other = tl.minimum(tl.maximum(raw_up, -limit), limit) + 1.0
        sigmoid = 1.0 / (1.0 + tl.exp(-1.702 * gate))
    else:
        gate = raw_gate
        other = raw_up
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return gate, sigmoid, other


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, x_row, limit, F: tl.constexpr, f: tl.constexpr, LIMITED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at_f = tl.program_id(1) * f + tl.arange(0, f)
    raw_gate = tl.load(x_ptr + row * x_row + at_f, mask=at_f < F, other=0.0).to(tl.float32)
    raw_up = tl.load(x_ptr + row * x_row + F + at_f, mask=at_f < F, other=0.0).to(tl.float32)
    gate, sigmoid, other = _factors(raw_gate, raw_up, limit, LIMITED)
    tl.store(out_ptr + row * F + at_f, (gate * sigmoid * other).to(out_ptr.dtype.element_ty), mask=at_f < F)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, grad_x_ptr, x_row, limit, F: tl.constexpr, f: tl.constexpr, LIMITED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at_f = tl.program_id(1) * f + tl.arange(0, f)
    raw_gate = tl.load(x_ptr + row * x_row + at_f, mask=at_f < F, other=0.0).to(tl.float32)
    raw_up = tl.load(x_ptr + row * x_row + F + at_f, mask=at_f < F, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * F + at_f, mask=at_f < F, other=0.0).to(tl.float32)
    gate, sigmoid, other = _factors(raw_gate, raw_up, limit, LIMITED)
    grad_up = grad * gate * sigmoid
    if LIMITED:
        grad_gate = grad * other * sigmoid * (1.0 + 1.702 * gate * (1.0 - sigmoid))
        grad_gate = tl.where(raw_gate <= limit, grad_gate, 0.0)
        grad_up = tl.where((raw_up >= -limit) & (raw_up <= limit), grad_up, 0.0)
    else:
        grad_gate = grad * other * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_x_ptr + row * 2 * F + at_f, grad_gate.to(grad_x_ptr.dtype.element_ty), mask=at_f < F)
    tl.store(grad_x_ptr + row * 2 * F + F + at_f, grad_up.to(grad_x_ptr.dtype.element_ty), mask=at_f < F)


def swiglu_forward(gate_up_NF: Tensor, limit: float) -> Tensor:
    """See `TorchOps.swiglu`."""
    rows, width = gate_up_NF.shape[0], gate_up_NF.shape[1] // 2
    x_NF = gate_up_NF if gate_up_NF.stride(1) == 1 else gate_up_NF.contiguous()
    out_NF = torch.empty(rows, width, device=x_NF.device, dtype=x_NF.dtype)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    if rows:
        _forward[(rows, triton.cdiv(width, columns))](
            x_NF, out_NF, x_NF.stride(0), limit, F=width, f=columns, LIMITED=limit > 0, num_warps=4
        )
    return out_NF


def swiglu_backward(grad_NF: Tensor, gate_up_NF: Tensor, limit: float) -> Tensor:
    """The gradient of gate and up, laid out as they are."""
    rows, width = grad_NF.shape
    x_NF = gate_up_NF if gate_up_NF.stride(1) == 1 else gate_up_NF.contiguous()
    grad_x_NF = torch.empty(rows, 2 * width, device=x_NF.device, dtype=x_NF.dtype)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    if rows:
        _backward[(rows, triton.cdiv(width, columns))](
            grad_NF.contiguous(),
            x_NF,
            grad_x_NF,
            x_NF.stride(0),
            limit,
            F=width,
            f=columns,
            LIMITED=limit > 0,
            num_warps=4,
        )
    return grad_x_NF
