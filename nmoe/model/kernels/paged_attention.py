"""Decode attention over the paged cache: one query token per row, keys and values in blocks that a table names.

On CUDA a Triton kernel reads the blocks where they lie (`paged_attention_triton`). Elsewhere, and in fp64, the reference below
gathers them. Both give a row the same result whatever other rows are in the batch.
"""

# Shapes: B rows, H query heads, J key-value heads, G = H / J, C key width, U value width, N blocks of P positions in the cache,
# M blocks a row's table holds, L positions gathered.

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.model.attention import AttentionLayer

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paged_attention(
    layer: AttentionLayer, q_BHC: Tensor, keys_NJPC: Tensor, values_NJPU: Tensor, table_BM: Tensor, lengths_B: Tensor
) -> Tensor:
    """What each row's query, which is that of its last position, sees of the row's first `lengths_B` positions, `[B, H, U]` in
    the query's dtype. Position p of row b lies in block `table_BM[b, p // P]` at place `p % P`. Sums are in fp32 (in fp64 where
    the cache is); a row of length 0 gets zeros.

    On CUDA nothing waits for the device: table entries past a row's length are never followed, and the kernel's grid is laid
    out for rows of M blocks.
    """
    if q_BHC.is_cuda and keys_NJPC.dtype in _KERNEL_DTYPES:
        from nmoe.model.kernels.paged_attention_triton import paged_attention_triton

        return paged_attention_triton(layer, q_BHC, keys_NJPC, values_NJPU, table_BM, lengths_B)
    return paged_attention_reference(layer, q_BHC, keys_NJPC, values_NJPU, table_BM, lengths_B)


def paged_attention_reference(
    layer: AttentionLayer, q_BHC: Tensor, keys_NJPC: Tensor, values_NJPU: Tensor, table_BM: Tensor, lengths_B: Tensor
) -> Tensor:
    """The same by gathering every row's blocks."""
    rows, heads, _ = q_BHC.shape
    kv_heads, block = keys_NJPC.shape[1:3]
    compute = torch.promote_types(keys_NJPC.dtype, torch.float32)
    blocks = -(-int(lengths_B.max()) // block)
    table_BM = table_BM[:, :blocks].long()
    at_L = torch.arange(blocks * block, device=q_BHC.device)
    age_BL = lengths_B.unsqueeze(1) - 1 - at_L
    seen_BL = (age_BL >= 0) & (age_BL < layer.window) if layer.window else age_BL >= 0
    # Entries past a row's length may be anything.
    inside_BM = torch.arange(blocks, device=q_BHC.device) * block < lengths_B.unsqueeze(1)
    table_BM = table_BM.masked_fill(~inside_BM, 0)

    def gathered(x_NJPW: Tensor) -> Tensor:
        x_BJLW = x_NJPW[table_BM].transpose(1, 2).reshape(rows, kv_heads, blocks * block, -1)
        # What lies behind a row's end may be a stray NaN, which no weight of zero would silence.
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
