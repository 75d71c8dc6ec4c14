"""A linear layer: the one place where a projection's weight meets its input."""

# Shapes: N rows, D inputs, F outputs.

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmoe.model.low_rank import LowRank
from nmoe.model.numerics import enough_rows, least_rows_of_mkl, linear


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
            return linear(x_ND, self.weight, self.exact, self.bias)
        if not self.exact:
            out_NF: Tensor = self.adapter(x_ND, self.weight, self.bias)
            return out_NF
        return self.adapter(enough_rows(x_ND, least_rows_of_mkl()), self.weight, self.bias)[: x_ND.shape[0]]
