"""Chooses the table of operations (torch, C++ kernels, Triton) for a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.model.ops.cpu import library, packing
from nmoe.model.ops.cpu.ops import CpuOps, KernelOps
from nmoe.model.ops.exact.ops import ExactOps, OrderFreeOps
from nmoe.model.ops.torch import TorchOps
from nmoe.model.ops.triton.ops import OrderFreeTritonOps, TritonOps

_TORCH, _CPU, _KERNELS, _TRITON = TorchOps(), CpuOps(), KernelOps(), TritonOps()
_EXACT, _ORDER_FREE, _ORDER_FREE_TRITON = ExactOps(), OrderFreeOps(), OrderFreeTritonOps()


def make_ready(device: torch.device) -> None:
    """Compiles the C++ kernels for a CPU, and prints a line that says so, if no earlier process has. Constructors of objects that
    need the kernels call this, so that no step waits for a compiler."""
    if device.type == "cpu":
        library.library()


def ops_for(x: Tensor, exact: bool = False) -> TorchOps:
    """Returns the table of operations for `x`. `exact` asks for bits that do not depend on the batch. It changes nothing in fp64,
    which tests compute in: there, differences between batches are too small to matter."""
    on_gpu, double = x.is_cuda, x.dtype == torch.float64
    if exact and not double:
        if on_gpu:
            return _ORDER_FREE_TRITON
        return _EXACT if x.dtype == torch.float32 and x.is_cpu and library.library() is not None else _ORDER_FREE
    if x.is_cpu:
        kernels = packing.IN_FORCE.kernels and x.dtype in library.DTYPES and not torch.is_grad_enabled()
        return _KERNELS if kernels else _CPU
    return _TRITON if on_gpu and not double else _TORCH
