"""A linear layer: the one place where a projection's weight meets its input."""

# Shapes: N rows, D inputs, F outputs.

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmoe.model.low_rank import LowRank
from nmoe.model.products import linear


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
            return linear(x_ND, self.weight, self.bias, self.exact)
        out_NF: Tensor = self.adapter(x_ND, self.weight, self.bias, self.exact)
        return out_NF
