"""A linear layer: the one place where a projection's weight meets its input."""

# Shapes: N rows, D inputs, F outputs.

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmoe.model.numerics import linear


class Linear(nn.Module):
    """`x @ weight.T + bias` with a weight `[F, D]`."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.exact = False

    def forward(self, x_ND: Tensor) -> Tensor:
        return linear(x_ND, self.weight, self.exact, self.bias)
