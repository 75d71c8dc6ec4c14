"""Products and attention whose sums no order can change: exact numerics where the C++ kernels cannot run.

Numbers are rounded to multiples of a power of two, so coarse that a product of two such numbers, and any sum of the products of a
piece, fits the 53 bits of an fp64. Then no addition rounds, and every library gives the same bits on every processor with any
number of threads, in any order (Ozaki et al. 2012, doi:10.1007/s11075-011-9478-1, section 3, with one slice for each factor).
Rounding to the grid costs as much accuracy as summing in fp32 does: 2^-23 of a row's largest number. A number that is not finite
makes its whole row NaN.

Scores of attention are products on this grid. A query's weights, at most 1, are split into multiples of 2^-22 and a rest in
multiples of 2^-44, because many small weights beside a large one add up. Values are split into slices of 22 bits. So a sum over 512
positions never rounds in any library. The exponential is torch's, element by element.
"""

# Shapes: N rows, D inputs, d of a piece, F outputs, B sequences, H query heads, J key-value heads, L queries, S keys, s of a piece,
# C key width, U value width, R = H / J * L.

from __future__ import annotations

import math

import torch
from torch import Tensor

from nmoe.model.ops.attention import AttentionLayer

BITS = 22  # of a grid number
PIECE = 512  # products that are added without rounding: 2 * 22 + 9 bits
_EXPONENT = 0x7F800000  # of an fp32


def on_grid(x: Tensor) -> Tensor:
    """Rounds each piece of 512 numbers of the last axis to multiples of a power of two, so that the piece's largest number keeps 22
    bits; returns fp64. `x` is at most fp32."""
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    # Rounded in fp32, whose 24 bits suffice; fp64 would take twice the memory and time.
    for piece, rounded_piece in zip(x.float().split(PIECE, -1), out.split(PIECE, -1), strict=True):
        rounded_piece.copy_(rounded(piece, _step(piece)))
    return out


def _step(x: Tensor) -> Tensor:
    """Returns the step of each row's grid: `2^-21` times the power of two at or below the row's largest number."""
    if not x.shape[-1]:
        return x.new_zeros(*x.shape[:-1], 1)
    largest = x.abs().amax(-1, keepdim=True)
    return (largest.view(torch.int32) & _EXPONENT).view(torch.float32) * 2.0 ** (1 - BITS)


def rounded(x: Tensor, step: Tensor | float) -> Tensor:
    """Rounds x to multiples of `step` (at most 2^22 times `step`), by adding a number whose last bit is worth one step and
    subtracting it again."""
    anchor = step * (1.5 * 2.0 ** (23 if x.dtype == torch.float32 else 52))
    return (x + anchor).sub_(anchor)


def product(x_ND: Tensor, weight_FD: Tensor) -> Tensor:
    """Returns `x @ weight.T` in fp64 for numbers that `on_grid` rounded; leading axes as in `matmul`."""
    pieces = zip(x_ND.split(PIECE, -1), weight_FD.split(PIECE, -1), strict=True)
    products = [x_Nd @ weight_Fd.mT for x_Nd, weight_Fd in pieces]
    out_NF = products[0]
    for more_NF in products[1:]:
        out_NF = out_NF.add_(more_NF)
    return out_NF


# The slices hold a value's bits from 2^11 to 2^-11, then to 2^-33, then to 2^-55; larger values have slices before these. The
# grid is the same for all values: one that followed the largest would depend on what comes after a query.
_HIGHEST, _SLICES = 11, 3


def attention(layer: AttentionLayer, q_BHLC: Tensor, k_BJSC: Tensor, v_BJSU: Tensor, seen: Tensor) -> Tensor:
    """Computes attention of each query to the keys that `seen` (`[L, S]` or `[B, 1, L, S]`) marks, `[B, H, L, U]` in the queries'
    dtype. Key s is at position s of its sequence."""
    (b, heads, length, width), kv_heads = q_BHLC.shape, k_BJSC.shape[1]
    q_BJRC = on_grid(q_BHLC).reshape(b, kv_heads, -1, width)
    scores_BHLS = product(q_BJRC, on_grid(k_BJSC)).mul_(layer.scale).view(b, heads, length, -1)
    scores_BHLS.masked_fill_(~seen, float("-inf"))
    highest_BHL1 = scores_BHLS.amax(-1, keepdim=True)
    if layer.sinks_H is not None:
        sinks_H11 = layer.sinks_H.detach().double().view(-1, 1, 1)
        highest_BHL1 = torch.maximum(highest_BHL1, sinks_H11)
    weights_BJPRS = _weights(scores_BHLS.sub_(highest_BHL1).view(b, kv_heads, -1, scores_BHLS.shape[-1]))
    total_BHL1 = weights_BJPRS.sum(-1, keepdim=True).sum(2).view(b, heads, length, 1)
    if layer.sinks_H is not None:
        total_BHL1 = total_BHL1 + _weights(sinks_H11 - highest_BHL1).sum(2)
    mixed_BJRU = _mixed(weights_BJPRS.flatten(2, 3), v_BJSU).unflatten(2, (2, -1)).sum(2)
    return (mixed_BJRU.view(b, heads, length, -1) / total_BHL1).to(q_BHLC.dtype)


def causal_attention(layer: AttentionLayer, q_BHLC: Tensor, k_BJSC: Tensor, v_BJSU: Tensor, earlier: int = 0) -> Tensor:
    """Computes causal `attention` with the layer's window; the queries are the last L of S = earlier + L positions."""
    positions, device = k_BJSC.shape[-2], k_BJSC.device
    query_L1 = torch.arange(earlier, positions, device=device).unsqueeze(1)
    age_LS = query_L1 - torch.arange(positions, device=device)
    seen_LS = age_LS >= 0
    if layer.window:
        seen_LS &= age_LS < layer.window
    return attention(layer, q_BHLC, k_BJSC, v_BJSU, seen_LS)


def _weights(shifted_BJRS: Tensor) -> Tensor:
    """Returns `exp` of numbers up to 0 as the sum of two parts, `[B, J, 2, R, S]`: multiples of 2^-22, and the rest in multiples of
    2^-44."""
    whole = shifted_BJRS.float().exp_()
    coarse = rounded(whole, 2.0**-BITS)
    parts = torch.empty(*whole.shape[:2], 2, *whole.shape[2:], dtype=torch.float64, device=whole.device)
    parts[:, :, 0] = coarse
    parts[:, :, 1] = rounded(whole.sub_(coarse), 2.0 ** (-2 * BITS))
    return parts


def _mixed(weights_BJRS: Tensor, v_BJSU: Tensor) -> Tensor:
    """Returns `weights @ v`: a sum over 512 positions of one slice of the values is exact, and these sums are added in a fixed
    order. Positions without weight add nothing, so neither keys after a query nor the largest value of another sequence change its
    bits."""
    width = v_BJSU.shape[-1]
    slices_BJSV = _slices(v_BJSU)
    pieces = zip(weights_BJRS.split(PIECE, -1), slices_BJSV.split(PIECE, -2), strict=True)
    sums = [weights_BJRs @ values_BJsV for weights_BJRs, values_BJsV in pieces]
    out_BJRU = weights_BJRS.new_zeros(*weights_BJRS.shape[:-1], width)
    for start in range(0, slices_BJSV.shape[-1], width):
        for sum_BJRV in sums:
            out_BJRU += sum_BJRV[..., start : start + width]
    return out_BJRU


def _slices(v_BJSU: Tensor) -> Tensor:
    """Splits all values into slices of 22 bits each, in fp64, one after another along the last axis."""
    rest_BJSU = v_BJSU.float()
    largest = float(rest_BJSU.abs().amax()) if rest_BJSU.numel() else 0.0
    above = max(0, math.ceil((math.log2(largest) - _HIGHEST) / BITS)) if 0 < largest < math.inf else 0
    if above:  # fp32 has no room for the anchors of the largest
        rest_BJSU = rest_BJSU.double()
    slices = []
    for i in range(-above, _SLICES):
        step = 2.0 ** (_HIGHEST - BITS * (i + 1))
        slice_BJSU = rounded(rest_BJSU, step)
        if i < 0:  # there only for larger values: the others are cut as if there were none
            slice_BJSU.masked_fill_(rest_BJSU.abs() <= step, 0.0)
        slices.append(slice_BJSU)
        rest_BJSU = rest_BJSU - slice_BJSU
    return torch.cat(slices, -1).double()
