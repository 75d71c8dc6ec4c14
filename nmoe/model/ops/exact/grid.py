"""Products whose sums no order can change: exact numerics where the C++ kernels cannot run.

Numbers are rounded to multiples of a power of two, so coarse that a product of two such numbers, and any sum of the products of
a piece, fits the 53 bits of an fp64. Then no addition rounds, and every library gives the same bits on every processor with any
number of threads, whatever the order (Ozaki et al. 2012, doi:10.1007/s11075-011-9478-1, section 3, with one slice for each
factor). Rounding to the grid costs as much accuracy as summing in fp32 does: 2^-23 of a row's largest number.

A number that is not finite makes its whole row NaN.
"""

# Shapes: N rows, D inputs, d those of a piece, F outputs.

from __future__ import annotations

import torch
from torch import Tensor

BITS = 22  # of a grid number
PIECE = 512  # products that are added without rounding: 2 * 22 + 9 bits
_EXPONENT = 0x7F800000  # of an fp32


def on_grid(x: Tensor) -> Tensor:
    """Rounds each piece of 512 numbers of the last axis to 22 bits below the piece's largest number; fp64. `x` is at most
    fp32."""
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    # Rounded in fp32, whose 24 bits suffice; fp64 would take twice the memory and time.
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
    """Rounds to multiples of `step`, at most 2^22 of them, by adding a number whose last bit is worth one step and subtracting
    it again."""
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
