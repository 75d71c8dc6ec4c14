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
_EXPONENT = 0x7F800000  # of an fp32


def on_grid(x: Tensor) -> Tensor:
    """`x`, of at most fp32, in fp64, each piece of 512 numbers of its last axis rounded to 22 bits below that piece's largest."""
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    # In fp32, whose 24 bits hold what is kept: fp64 takes twice the memory, and the time.
    for piece, rounded_piece in zip(x.float().split(PIECE, -1), out.split(PIECE, -1), strict=True):
        rounded_piece.copy_(rounded(piece, _step(piece)))
    return out


def _step(x: Tensor) -> Tensor:
    """The power of two that is a unit of the grid: `2^-21` times the one at or below the row's largest number."""
    if not x.shape[-1]:
        return x.new_zeros(*x.shape[:-1], 1)
    largest = x.abs().amax(-1, keepdim=True)
    return (largest.view(torch.int32) & _EXPONENT).view(torch.float32) * 2.0 ** (1 - BITS)


def rounded(x: Tensor, step: Tensor | float) -> Tensor:
    """Multiples of `step`, at most 2^22 of them: adding a number whose last bit is worth one step leaves no room for more."""
    anchor = step * (1.5 * 2.0 ** (23 if x.dtype == torch.float32 else 52))
    return (x + anchor).sub_(anchor)


def product(x_ND: Tensor, weight_FD: Tensor) -> Tensor:
    """`x @ weight.T` in fp64 of numbers on the grid; leading axes as those of `matmul`."""
    pieces = zip(x_ND.split(PIECE, -1), weight_FD.split(PIECE, -1), strict=True)
    products = [x_Nd @ weight_Fd.mT for x_Nd, weight_Fd in pieces]
    out_NF = products[0]
    for more_NF in products[1:]:
        out_NF = out_NF.add_(more_NF)
    return out_NF
