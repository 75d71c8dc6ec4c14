"""The Triton kernels of `paged_attention`: one program per row, key-value head and split of the row's positions.

The G query heads of a key-value head are one tile, so that keys and values are read once. A row's visible positions are cut
into splits (flash-decoding), whose partial softmaxes a second kernel joins. How many splits a row has depends on its own
length and on nothing else in the batch, and a row of one split gets the same bits from either kernel: results are invariant
to the batch. The grid holds as many splits as the longest possible row; programs past a row's own splits end at once.
"""

# Shapes: B rows, H query heads, J key-value heads, G = H / J, C key width, U value width, N blocks of P positions in the cache,
# M blocks a row's table holds, S splits; in the kernels a small letter is that width padded to a power of two, n positions of
# a tile.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe.model.ops.attention import AttentionLayer

# Positions that one program reads at most. Shorter splits fill the chip with fewer rows, and cost their partial results: at 512
# those are under 2% of the bytes of the keys and values they stand for (two query heads per key-value head, bf16, width 128).
SPLIT_POSITIONS = 512

# Splits that the second kernel joins at a time.
_JOIN = 16

# Positions of a tile, fewer where keys and values are so wide that a tile would pass 64 KB: three tiles in flight then stay
# within the 227 KB of shared memory that a block of a Hopper chip has.
TILE_POSITIONS = 64
_TILE_BYTES = 65536
WARPS = 4
STAGES = 3

_LOG2_E = 1.4426950408889634


@triton.jit
def _visible(lengths, row, WINDOW: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a row's first visible position, its length, and its number of splits (at least one, which writes zeros for an empty
    row)."""
    length = tl.load(lengths + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    return first, length, tl.maximum(tl.cdiv(length - first, SPLIT), 1)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    lengths_ptr,
    sinks_ptr,
    out_ptr,
    state_ptr,
    scale_log2,
    q_row,
    q_head,
    key_block,
    key_head,
    key_position,
    value_block,
    value_head,
    value_position,
    table_row,
    G: tl.constexpr,
    C: tl.constexpr,
    U: tl.constexpr,
    P: tl.constexpr,
    g: tl.constexpr,
    c: tl.constexpr,
    u: tl.constexpr,
    n: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Computes attention for one row, key-value head and split (Triton kernel).

    Writes partial sums `[B, H, S, U]` and their state `[B, H, S, 2]`, which is the largest logit to base 2 and
    the sum of the weights relative to it. Without JOINED, a row has one split, and the result `[B, H, U]` is written.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first, length, splits = _visible(lengths_ptr, row, WINDOW, SPLIT)
    if split >= splits:
        return
    # The same number of whole tiles to each split.
    span = tl.cdiv(tl.cdiv(length - first, splits), n) * n
    begin = first + split * span
    end = tl.minimum(begin + span, length)

    at_g = tl.arange(0, g)
    at_c = tl.arange(0, c)
    at_u = tl.arange(0, u)
    at_n = tl.arange(0, n)
    heads = head * G + at_g
    q_gc = tl.load(
        q_ptr + row.to(tl.int64) * q_row + heads[:, None] * q_head + at_c[None, :],
        mask=(at_g[:, None] < G) & (at_c[None, :] < C),
        other=0.0,
    ).to(keys_ptr.dtype.element_ty)

    # A finite floor: no difference of infinities arises, and a row of length 0 ends with zeros.
    largest_g = tl.full([g], -1.0e30, tl.float32)
    total_g = tl.zeros([g], tl.float32)
    if HAS_SINKS:
        # The sink is where the first split's sums start: weight one at its own logit, and no value.
        sink_g = tl.load(sinks_ptr + heads, mask=at_g < G, other=0.0).to(tl.float32) * 1.4426950408889634
        largest_g = tl.where(split == 0, sink_g, largest_g)
        total_g = tl.where(split == 0, 1.0, total_g)
    sum_gu = tl.zeros([g, u], tl.float32)

    for start in range(begin, end, n):
        at = start + at_n
        inside = at < end
        block_n = tl.load(table_ptr + row.to(tl.int64) * table_row + at // P, mask=inside, other=0).to(tl.int64)
        position_n = at % P
        k_nc = tl.load(
            keys_ptr + (block_n * key_block + head * key_head + position_n * key_position)[:, None] + at_c[None, :],
            mask=inside[:, None] & (at_c[None, :] < C),
            other=0.0,
        )
        v_nu = tl.load(
            values_ptr
            + (block_n * value_block + head * value_head + position_n * value_position)[:, None]
            + at_u[None, :],
            mask=inside[:, None] & (at_u[None, :] < U),
            other=0.0,
        )
        scores_gn = tl.dot(q_gc, tl.trans(k_nc), input_precision="ieee") * scale_log2
        scores_gn = tl.where(inside[None, :], scores_gn, float("-inf"))
        new_g = tl.maximum(largest_g, tl.max(scores_gn, 1))
        keep_g = tl.exp2(largest_g - new_g)
        weights_gn = tl.exp2(scores_gn - new_g[:, None])
        total_g = total_g * keep_g + tl.sum(weights_gn, 1)
        sum_gu = tl.dot(weights_gn.to(v_nu.dtype), v_nu, acc=sum_gu * keep_g[:, None], input_precision="ieee")
        largest_g = new_g

    rows = row.to(tl.int64) * tl.num_programs(1) * G + heads
    mask_gu = (at_g[:, None] < G) & (at_u[None, :] < U)
    if not JOINED:
        out_gu = sum_gu / tl.where(total_g > 0, total_g, 1.0)[:, None]
        tl.store(out_ptr + rows[:, None] * U + at_u[None, :], out_gu.to(out_ptr.dtype.element_ty), mask=mask_gu)
    else:
        parts = rows * tl.num_programs(2) + split
        tl.store(out_ptr + parts[:, None] * U + at_u[None, :], sum_gu, mask=mask_gu)
        tl.store(state_ptr + parts * 2, largest_g, mask=at_g < G)
        tl.store(state_ptr + parts * 2 + 1, total_g, mask=at_g < G)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    parts_ptr,
    state_ptr,
    lengths_ptr,
    out_ptr,
    most_splits,
    U: tl.constexpr,
    u: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    s: tl.constexpr,
):
    """Joins the partial softmaxes of the splits of one row and query head (Triton kernel)."""
    row = tl.program_id(0)
    _first, _length, splits = _visible(lengths_ptr, row, WINDOW, SPLIT)
    head = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    at_u = tl.arange(0, u)
    largest = -1.0e30
    total = 0.0
    sum_u = tl.zeros([u], tl.float32)
    for start in range(0, splits, s):
        at_s = start + tl.arange(0, s)
        inside = at_s < splits
        parts = head * most_splits + at_s
        largest_s = tl.load(state_ptr + parts * 2, mask=inside, other=-1.0e30)
        total_s = tl.load(state_ptr + parts * 2 + 1, mask=inside, other=0.0)
        sum_su = tl.load(
            parts_ptr + parts[:, None] * U + at_u[None, :], mask=inside[:, None] & (at_u[None, :] < U), other=0.0
        )
        new = tl.maximum(largest, tl.max(largest_s, 0))
        keep = tl.exp2(largest - new)
        weight_s = tl.where(inside, tl.exp2(largest_s - new), 0.0)
        total = total * keep + tl.sum(total_s * weight_s, 0)
        sum_u = sum_u * keep + tl.sum(sum_su * weight_s[:, None], 0)
        largest = new
    out_u = sum_u / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + head * U + at_u, out_u.to(out_ptr.dtype.element_ty), mask=at_u < U)


def paged_attention_triton(
    layer: AttentionLayer, q_BHC: Tensor, keys_NJPC: Tensor, values_NJPU: Tensor, table_BM: Tensor, lengths_B: Tensor
) -> Tensor:
    """Computes `TorchOps.paged_attention` by the two kernels. Rows of the cache must be contiguous in their last axis."""
    rows, heads, width = q_BHC.shape
    kv_heads, block = keys_NJPC.shape[1:3]
    value_width = values_NJPU.shape[-1]
    group = heads // kv_heads
    if q_BHC.stride(-1) != 1:
        q_BHC = q_BHC.contiguous()
    assert keys_NJPC.stride(-1) == values_NJPU.stride(-1) == table_BM.stride(-1) == 1, "the kernel steps by one there"

    reach = table_BM.shape[1] * block
    splits = max(1, triton.cdiv(min(reach, layer.window or reach), SPLIT_POSITIONS))
    wide, value_wide = _padded(width), _padded(value_width)
    tile = TILE_POSITIONS
    while tile > 16 and tile * (wide + value_wide) * keys_NJPC.element_size() > _TILE_BYTES:
        tile //= 2
    out_BHU = torch.empty(rows, heads, value_width, device=q_BHC.device, dtype=q_BHC.dtype)
    parts, state = out_BHU, out_BHU
    if splits > 1:
        parts = torch.empty(rows, heads, splits, value_width, device=q_BHC.device, dtype=torch.float32)
        state = torch.empty(rows, heads, splits, 2, device=q_BHC.device, dtype=torch.float32)
    _attend[(rows, kv_heads, splits)](
        q_BHC,
        keys_NJPC,
        values_NJPU,
        table_BM,
        lengths_B,
        layer.sinks_H if layer.sinks_H is not None else q_BHC,
        parts,
        state,
        layer.scale * _LOG2_E,
        q_BHC.stride(0),
        q_BHC.stride(1),
        *keys_NJPC.stride()[:3],
        *values_NJPU.stride()[:3],
        table_BM.stride(0),
        G=group,
        C=width,
        U=value_width,
        P=block,
        g=_padded(group),
        c=wide,
        u=value_wide,
        n=tile,
        WINDOW=layer.window,
        SPLIT=SPLIT_POSITIONS,
        HAS_SINKS=layer.sinks_H is not None,
        JOINED=splits > 1,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if splits > 1:
        _join[(rows, heads)](
            parts,
            state,
            lengths_B,
            out_BHU,
            splits,
            U=value_width,
            u=value_wide,
            WINDOW=layer.window,
            SPLIT=SPLIT_POSITIONS,
            s=_JOIN,
            num_warps=WARPS,
        )
    return out_BHU


def _padded(width: int) -> int:
    """Returns the least power of two that is at least `width` and at least 16, the smallest size that the hardware's matrix product
    takes."""
    return max(16, triton.next_power_of_2(width))
