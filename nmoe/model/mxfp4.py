"""Experts that stay in MXFP4 in memory: four bits per number and a shared power of two for each 32 numbers, dequantised for each
product."""

# Shapes: E experts, D inputs, N outputs, G blocks of 32 numbers, W bytes of a block, T tokens, K chosen experts.

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmoe.errors import UserError

# The values of the four bits of E2M1 (OCP Microscaling Formats, version 1.0, section 5.3.3).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

BLOCK = 32

# The largest scale under which 6.0 is finite in bf16; 255 is NaN.
LARGEST_SCALE = 252


def dequantised(blocks_ENGW: Tensor, scales_ENG: Tensor) -> Tensor:
    """Dequantises MXFP4 experts to bf16, `[E, inputs, N]` as a view of `[E, N, inputs]`. A byte holds two numbers of four bits, the
    lower bits first; each block of 32 numbers has a power of two, `2 ** (scale - 127)`, where a scale of 255 is NaN. Exact: bf16
    holds every product.

    Raises UserError if blocks and scales do not match.
    """
    found = (
        f"blocks {list(blocks_ENGW.shape)} {blocks_ENGW.dtype} and scales {list(scales_ENG.shape)} {scales_ENG.dtype}"
    )
    if blocks_ENGW.dim() != 4 or blocks_ENGW.shape[:-1] != scales_ENG.shape or blocks_ENGW.shape[-1] != BLOCK // 2:
        raise UserError(f"{found} are not MXFP4: [E, N, G, 16] and [E, N, G]")
    if blocks_ENGW.dtype != torch.uint8 or scales_ENG.dtype != torch.uint8:
        raise UserError(f"{found} are not MXFP4: both are bytes")
    device = blocks_ENGW.device
    values = torch.tensor(_FP4, dtype=torch.bfloat16)
    # All pairs of values, indexed by byte: looking up a whole byte is six times faster than looking up its halves.
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1).to(device)
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127).to(torch.bfloat16)
    powers[255] = torch.nan
    powers = powers.to(device)
    out_ENGX = torch.empty(*scales_ENG.shape, BLOCK, dtype=torch.bfloat16, device=device)
    for out_NGX, blocks_NGW, scales_NG in zip(out_ENGX, blocks_ENGW, scales_ENG, strict=True):
        # One expert at a time, because indices take four times the memory of the bytes.
        torch.index_select(pairs, 0, blocks_NGW.flatten().int(), out=out_NGX.view(-1, 2))
        out_NGX.mul_(powers[scales_NG.int()].unsqueeze(-1))
    return out_ENGX.flatten(-2).transpose(1, 2)


class PackedExperts(nn.Module):
    """One projection of a layer's experts, `[E, D, N]`, in MXFP4: 17/32 bytes a number. It has no parameters, so it cannot be
    trained."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        shape = (experts, outputs, inputs // BLOCK)
        self.register_buffer("blocks", torch.empty(*shape, BLOCK // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(shape, dtype=torch.uint8))
        self.blocks: Tensor
        self.scales: Tensor

    def forward(self, chosen_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantises the experts to `[E, D, N]`. On a CPU only the chosen experts are set; a GPU dequantises all, because
        otherwise the host would have to wait to learn which are chosen."""
        experts, outputs, groups = self.scales.shape
        out_EDN = torch.empty(experts, groups * BLOCK, outputs, dtype=dtype, device=self.blocks.device)
        used = range(experts) if self.blocks.device.type != "cpu" else chosen_TK.unique().tolist()
        for expert in used:
            only = slice(expert, expert + 1)
            # In the layout of a dequantised model, so that products have its bits.
            out_EDN[only].copy_(dequantised(self.blocks[only], self.scales[only]))
        return out_EDN
