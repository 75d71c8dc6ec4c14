"""Attention in torch: causal, over whole sequences, and in decoding, over the blocks of a paged cache."""

# Shapes: B sequences or rows, H query heads, J key-value heads, G = H / J, C key width, U value width, L queries (in decoding:
# positions gathered), S keys, N blocks of P positions in the cache, M blocks a row's table holds.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Kernels need head widths that are multiples of this.
_WIDTH_STEP = 8

# Queries that run together where a mask is needed. A mask of all of them is 64 MiB in bf16 at 65,536 keys.
BLOCK_QUERIES = 512


@dataclass(frozen=True)
class AttentionLayer:
    """The properties of an attention layer that an `Attend` needs.

    A query sees the last `window` tokens, its own included (0: all). `sinks_H` has a logit for each query head that counts only in
    the softmax's sum (Xiao et al. 2023, arXiv:2309.17453, as learned in gpt-oss).
    """

    index: int
    scale: float
    window: int = 0
    sinks_H: Tensor | None = None


@dataclass(frozen=True)
class Clusters:
    """Packed sequences grouped by the leading rows that they share, as kernels read them. Each sequence is a triple in `spans_B3`:
    the number of leading rows that it shares with the first sequence of its cluster, the first of its other rows, and their number.
    Cluster g has the sequences `bounds_G[g]` to `bounds_G[g + 1]`, the first of them without shared rows. `longest` is the length
    of the longest sequence."""

    spans_B3: Tensor
    bounds_G: Tensor
    longest: int


def causal_attention(
    layer: AttentionLayer,
    q_BHLC: Tensor,
    k_BJSC: Tensor,
    v_BJSU: Tensor,
    earlier: int = 0,
    by_kv_head: bool = False,
) -> Tensor:
    """Computes causal attention with the layer's window and sinks, `[B, H, L, U]`. The queries are the last L of S = earlier + L
    positions. `by_kv_head` chooses how layers that need a mask are computed (see `attention_in_blocks`).

    A sink is one more key before the others: the queries have an extra column with the sink's logit, the sink's key has a one
    there, and its value is zero. So any kernel computes it, with its gradient.
    """
    width, value_width, length, positions = q_BHLC.shape[-1], v_BJSU.shape[-1], q_BHLC.shape[-2], k_BJSC.shape[-2]
    sinks_H = layer.sinks_H
    square = earlier == 0 and not 0 < layer.window < length
    if sinks_H is not None:
        column_H11 = (sinks_H.to(q_BHLC.dtype) / layer.scale).view(-1, 1, 1)
        q_BHLC = torch.cat([q_BHLC, column_H11.expand(*q_BHLC.shape[:-1], 1)], -1)
        # A causal kernel needs as many queries as keys, so one unused query is added.
        q_BHLC = F.pad(q_BHLC, (0, _WIDTH_STEP - 1, int(square), 0))
        k_BJSC = F.pad(k_BJSC, (0, _WIDTH_STEP, 1, 0))
        first = torch.zeros(positions + 1, width + _WIDTH_STEP, device=k_BJSC.device, dtype=k_BJSC.dtype)
        first[0, width] = 1
        k_BJSC = k_BJSC + first
        v_BJSU = F.pad(v_BJSU, (0, 0, 1, 0))
    # The fast kernels need values as wide as the keys.
    if (missing := q_BHLC.shape[-1] - value_width) > 0:
        v_BJSU = F.pad(v_BJSU, (0, missing))
    mask_LS = None
    if not square:
        query_L = torch.arange(earlier, positions, device=q_BHLC.device)
        key_S = torch.arange(-(sinks_H is not None), positions, device=q_BHLC.device)
        age_LS = query_L.unsqueeze(1) - key_S
        mask_LS = age_LS >= 0
        if layer.window:
            mask_LS &= (age_LS < layer.window) | (key_S < 0)
    attend = _grouped if mask_LS is None or not by_kv_head else _by_kv_head
    return attend(q_BHLC, k_BJSC, v_BJSU, mask_LS, layer.scale)[:, :, -length:, :value_width]


def _grouped(q_BHLC: Tensor, k_BJSC: Tensor, v_BJSC: Tensor, mask_LS: Tensor | None, scale: float) -> Tensor:
    gqa = q_BHLC.shape[1] != k_BJSC.shape[1]
    return F.scaled_dot_product_attention(
        q_BHLC, k_BJSC, v_BJSC, mask_LS, is_causal=mask_LS is None, scale=scale, enable_gqa=gqa
    )


def _by_kv_head(q_BHLC: Tensor, k_BJSC: Tensor, v_BJSC: Tensor, mask_LS: Tensor | None, scale: float) -> Tensor:
    """Computes `_grouped` with a batch entry per key-value head, so that its query heads share the keys as a view."""
    batch, kv_heads = k_BJSC.shape[:2]
    q_NGLC = q_BHLC.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    k_NGSC, v_NGSC = (x.flatten(0, 1).unsqueeze(1).expand(-1, q_NGLC.shape[1], -1, -1) for x in (k_BJSC, v_BJSC))
    out_NGLC = F.scaled_dot_product_attention(q_NGLC, k_NGSC, v_NGSC, mask_LS, scale=scale)
    return out_NGLC.unflatten(0, (batch, kv_heads)).flatten(1, 2)


def attention_in_blocks(
    layer: AttentionLayer, q_BHLC: Tensor, k_BJSC: Tensor, v_BJSU: Tensor, earlier: int = 0
) -> Tensor:
    """Computes `causal_attention` on accelerators: layers that need a mask run in blocks of queries, each with the keys that it can
    see, so that no mask or score is as large as all queries times all keys.

    CUDA's fast kernels take either a mask or key-value heads that several query heads share, not both: torch would compute such a
    layer with all scores in memory. So key-value heads are shared as a view.
    """
    length = q_BHLC.shape[-2]
    if earlier == 0 and not 0 < layer.window < length:
        return causal_attention(layer, q_BHLC, k_BJSC, v_BJSU)
    parts = []
    for start in range(0, length, BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, length)
        first = max(0, earlier + start - layer.window + 1) if layer.window else 0
        keys = slice(first, earlier + stop)
        rows = q_BHLC[:, :, start:stop], k_BJSC[:, :, keys], v_BJSU[:, :, keys]
        parts.append(causal_attention(layer, *rows, earlier + start - first, by_kv_head=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def paged_attention(
    layer: AttentionLayer, q_BHC: Tensor, keys_NJPC: Tensor, values_NJPU: Tensor, table_BM: Tensor, lengths_B: Tensor
) -> Tensor:
    """Computes `TorchOps.paged_attention` by gathering every row's blocks of the cache."""
    rows, heads, _ = q_BHC.shape
    kv_heads, block = keys_NJPC.shape[1:3]
    compute = torch.promote_types(keys_NJPC.dtype, torch.float32)
    blocks = -(-int(lengths_B.max()) // block)
    table_BM = table_BM[:, :blocks].long()
    at_L = torch.arange(blocks * block, device=q_BHC.device)
    age_BL = lengths_B.unsqueeze(1) - 1 - at_L
    seen_BL = (age_BL >= 0) & (age_BL < layer.window) if layer.window else age_BL >= 0
    # Entries past a row's length are arbitrary.
    inside_BM = torch.arange(blocks, device=q_BHC.device) * block < lengths_B.unsqueeze(1)
    table_BM = table_BM.masked_fill(~inside_BM, 0)

    def gathered(x_NJPW: Tensor) -> Tensor:
        x_BJLW = x_NJPW[table_BM].transpose(1, 2).reshape(rows, kv_heads, blocks * block, -1)
        # Unused positions may hold NaN, which a weight of zero would not remove.
        return x_BJLW.to(compute).masked_fill(~seen_BL[:, None, :, None], 0)

    q_BJGC = q_BHC.to(compute).unflatten(1, (kv_heads, -1))
    scores_BJGL = (q_BJGC @ gathered(keys_NJPC).transpose(-1, -2)) * layer.scale
    scores_BHL = scores_BJGL.flatten(1, 2).masked_fill(~seen_BL.unsqueeze(1), float("-inf"))
    largest_BH1 = scores_BHL.amax(-1, keepdim=True).clamp(min=-1e30)
    if layer.sinks_H is not None:
        sinks_BH1 = layer.sinks_H.to(compute).view(1, heads, 1).expand(rows, -1, -1)
        largest_BH1 = torch.maximum(largest_BH1, sinks_BH1)
    weights_BHL = (scores_BHL - largest_BH1).exp()
    total_BH1 = weights_BHL.sum(-1, keepdim=True)
    if layer.sinks_H is not None:
        total_BH1 = total_BH1 + (sinks_BH1 - largest_BH1).exp()
    weights_BJGL = (weights_BHL / total_BH1.clamp(min=torch.finfo(compute).tiny)).unflatten(1, (kv_heads, -1))
    return (weights_BJGL @ gathered(values_NJPU)).flatten(1, 2).to(q_BHC.dtype)
