"""Causal attention within packed sequences by torch's variable-length kernel (FlashAttention-2), forward and backward.

Its backward adds query gradients in the order in which blocks finish, so two runs may differ in the last bits.
"""

# Shapes: T packed tokens, B sequences, H query heads, J key-value heads, C head width, U value width.

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.ops.attention import AttentionLayer

# The kernel needs head widths that are multiples of the first, at most the second, and the same for keys and values.
_WIDTH_STEP, _WIDEST = 8, 256


class VarlenAttention:
    """An `Attend` over sequences laid end to end; `lengths` gives their lengths in that order. If they share rows, `shared`
    gives the rows, of all T, that it is called with, and the place of each of the T among them."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, shared: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.shared = shared
        # Imported here because it loads torch's compiler, which costs a second of start-up that no CPU run needs.
        from torch.nn.attention import varlen

        present = [length for length in lengths if length]
        self.longest = max(present, default=0)
        self.bounds_B = torch.tensor([0, *present]).cumsum(0).to(device, torch.int32)
        self.kernel: Any = varlen.varlen_attn  # its signature differs between versions
        # torch 2.11 always takes fewer key-value heads; later versions have an argument for it.
        self.says_gqa = "enable_gqa" in inspect.signature(self.kernel).parameters

    def takes(self, layer: AttentionLayer, q_THC: Tensor) -> bool:
        """Whether the kernel computes this layer, gradients included. A sink could be added by the log of the softmax's sum,
        which the kernel returns, but no gradient passes through that."""
        return q_THC.dtype in (torch.bfloat16, torch.float16) and q_THC.shape[-1] <= _WIDEST and layer.sinks_H is None

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        if self.shared is not None:
            q_THC, k_TJC, v_TJU = (x.index_select(0, self.shared[1]) for x in (q_THC, k_TJC, v_TJU))
        width, value_width = q_THC.shape[-1], v_TJU.shape[-1]
        assert value_width <= width, "values are padded to the keys' width"
        padded = -(-width // _WIDTH_STEP) * _WIDTH_STEP
        q_THC, k_TJC, v_TJU = (
            x if x.shape[-1] == padded else F.pad(x, (0, padded - x.shape[-1])) for x in (q_THC, k_TJC, v_TJU)
        )
        gqa = q_THC.shape[1] != k_TJC.shape[1]
        o_THU: Tensor = self.kernel(
            q_THC,
            k_TJC,
            v_TJU,
            self.bounds_B,
            self.bounds_B,
            self.longest,
            self.longest,
            scale=layer.scale,
            # The numbers of visible keys before and after the query's own; (-1, 0) is causal without a window.
            window_size=(layer.window - 1, 0) if 0 < layer.window < self.longest else (-1, 0),
            **({"enable_gqa": True} if gqa and self.says_gqa else {}),
        )
        o_THU = o_THU if padded == value_width else o_THU[..., :value_width]
        return o_THU if self.shared is None else o_THU.index_select(0, self.shared[0])
