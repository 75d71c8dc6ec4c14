"""Linear layers, norms and dense feed-forward blocks."""

# Shapes: N rows, T tokens, D inputs or width, F outputs or hidden units.

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmoe.model.low_rank import LowRank
from nmoe.model.ops.table import ops_for


class Linear(nn.Module):
    """`x @ weight.T + bias` with a weight `[F, D]`, and the low-rank updates of an adapter where it has one."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.exact = False
        self.adapter: LowRank | None = None

    def forward(self, x_ND: Tensor) -> Tensor:
        if self.adapter is None:
            return ops_for(x_ND, self.exact).linear(x_ND, self.weight, self.bias)
        out_NF: Tensor = self.adapter(x_ND, self.weight, self.bias, self.exact)
        return out_NF


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis with a learned scale (Zhang and Sennrich 2019, arXiv:1910.07467): the
    weight or, with `offset`, one plus the weight."""

    def __init__(self, width: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps, self.offset = eps, offset

    @property
    def factors(self) -> Tensor:
        """What the normalised numbers are multiplied by."""
        # The sum is rounded only once.
        return (1 + self.weight.float()).to(self.weight.dtype) if self.offset else self.weight

    def forward(self, x_ND: Tensor) -> Tensor:
        return ops_for(x_ND).rms_norm(x_ND, self.factors, self.eps)


class SwiGLU(nn.Module):
    """A dense SwiGLU block; gate and up are one matrix, in that order."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, 2 * intermediate)
        self.down_proj = Linear(intermediate, width)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_up = self.gate_up_proj
        if gate_up.adapter is None and gate_up.bias is None:
            hidden_TF = ops_for(x_TD, gate_up.exact).swiglu_linear(x_TD, gate_up.weight)
        else:
            gate_up_TF = gate_up(x_TD)
            hidden_TF = ops_for(gate_up_TF, gate_up.exact).swiglu(gate_up_TF)
        out_TD: Tensor = self.down_proj(hidden_TF)
        return out_TD


class GeGLU(SwiGLU):
    """A dense block with GELU, by its approximation with tanh, instead of SiLU (Shazeer 2020, arXiv:2002.05202)."""

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_up_TF = self.gate_up_proj(x_TD)
        out_TD: Tensor = self.down_proj(ops_for(gate_up_TF, self.gate_up_proj.exact).geglu(gate_up_TF))
        return out_TD
