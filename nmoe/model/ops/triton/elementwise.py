"""The Triton kernels of `TorchOps.rotate` and `swiglu`, computed in fp32 and rounded once. One launch turns all heads of a token;
the forward and the backward pass of SwiGLU each read memory once.
"""

# Shapes: T tokens, N heads (of SwiGLU: rows), C dimensions turned, c = C / 2 pairs, F hidden units.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_row, x_head, N, PAIRS: tl.constexpr, n: tl.constexpr, c: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at_n = tl.program_id(1) * n + tl.arange(0, n)
    at_c = tl.arange(0, c)
    turned = at_c < PAIRS
    mask = (at_n[:, None] < N) & turned[None, :]
    cos = tl.load(cos_ptr + token * PAIRS + at_c, mask=turned, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * PAIRS + at_c, mask=turned, other=0.0).to(tl.float32)[None, :]
    at = token * x_row + at_n[:, None] * x_head + at_c[None, :]
    first = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + PAIRS, mask=mask, other=0.0).to(tl.float32)
    to = (token * N + at_n[:, None]) * 2 * PAIRS + at_c[None, :]
    tl.store(out_ptr + to, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + to + PAIRS, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


_HEADS = 8


def rotate_triton(x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
    """Computes `TorchOps.rotate` in fp32, rounded once."""
    tokens, heads, width = x_TNC.shape
    if x_TNC.stride(-1) != 1:
        x_TNC = x_TNC.contiguous()
    out_TNC = torch.empty(tokens, heads, width, device=x_TNC.device, dtype=x_TNC.dtype)
    n = min(_HEADS, triton.next_power_of_2(heads))
    if tokens:
        _rotate[(tokens, triton.cdiv(heads, n))](
            x_TNC,
            cos_T1c.contiguous(),
            sin_T1c.contiguous(),
            out_TNC,
            x_TNC.stride(0),
            x_TNC.stride(1),
            heads,
            PAIRS=width // 2,
            n=n,
            c=triton.next_power_of_2(width // 2),
            num_warps=4,
        )
    return out_TNC


_COLUMNS = 1024


@triton.jit
def _factors(raw_gate, raw_up, limit, LIMITED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the three factors of the activation: gate, the gate's sigmoid, and up (clamped plus one with a limit)."""
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
    """Computes `TorchOps.swiglu` by a Triton kernel."""
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
    """Returns the gradient of gate and up, `[N, 2F]`, in that order, contiguous."""
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
