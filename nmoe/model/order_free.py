"""Products whose sums no order can change: exact numerics where the C++ kernels cannot run.

A number is rounded to a grid, a multiple of a power of two, so coarse that a product of two grid numbers, and any sum of as many
products as a piece has, fits the 53 bits of an fp64. Then no addition rounds, and every library on every processor with any number
of threads gives the same bits, whatever it adds first (Ozaki et al. 2012, doi:10.1007/s11075-011-9478-1, section 3, with one slice
for each factor). Rounding to the grid costs as much accuracy as summing in fp32 does: 2^-23 of a row's largest number.

Numbers that are not finite make their whole row NaN.
"""

# Shapes: N rows, D inputs, d those of a piece, F outputs.

from __future__ import annotations

import torch
from torch import Tensor

BITS = 22  # of a grid number
PIECE = 512  # products that are added without rounding: 2 * 22 + 9 bits
_EXPONENT = 0x7FF0000000000000  # of an fp64


def needed(x: Tensor) -> bool:
    """Whether exact numerics concern `x`: in fp64, which tests compute in, what depends on the batch is beyond all they show."""
    return x.dtype != torch.float64


def on_grid(x: Tensor) -> Tensor:
    """`x` in fp64, each piece of 512 numbers of its last axis rounded to 22 bits below that piece's largest."""
    return torch.cat([rounded(piece, _step(piece)) for piece in x.double().split(PIECE, -1)], -1)


def _step(x: Tensor) -> Tensor:
    """The power of two that is a unit of the grid: `2^-21` times the one at or below the row's largest number."""
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    return (largest.view(torch.int64) & _EXPONENT).view(torch.float64) * 2.0 ** (1 - BITS)


def rounded(x: Tensor, step: Tensor | float) -> Tensor:
    """Multiples of `step`: adding a number whose last bit is worth one step leaves no room for more."""
    anchor = step * (1.5 * 2.0**52)
    return (x + anchor).sub_(anchor)


def product(x_ND: Tensor, weight_FD: Tensor) -> Tensor:
    """`x @ weight.T` in fp64 of numbers on the grid; leading axes as those of `matmul`."""
    pieces = zip(x_ND.split(PIECE, -1), weight_FD.split(PIECE, -1), strict=True)
    products = [x_Nd @ weight_Fd.mT for x_Nd, weight_Fd in pieces]
    out_NF = products[0]
    for more_NF in products[1:]:
        out_NF = out_NF.add_(more_NF)
    return out_NF
