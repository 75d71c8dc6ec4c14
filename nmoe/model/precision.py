"""The precision that a model computes in. Weights, activations and the key-value cache take it; where rounding would cost the
agreement of sampler and learner, everything stays in fp32: routers, rotary tables, sums within norms, logits and softmax."""

from __future__ import annotations

from typing import Literal

import torch

from nmoe.model.moe import Router
from nmoe.model.transformer import Transformer

Precision = Literal["float32", "bfloat16", "float16"]


def set_precision(model: Transformer, precision: Precision) -> Transformer:
    """Casts the weights in place; engine and learner share them. `exact` numerics are for fp32."""
    return cast(model, getattr(torch, precision))


def cast(model: Transformer, dtype: torch.dtype) -> Transformer:
    """Casts every parameter in place but the routers', which are fp32 and never pass through `dtype`: 64 balancing biases around
    4.5 would become 4 values in bf16, and routing another. Buffers stay as they are."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(torch.float32 if isinstance(module, Router) else dtype)
    return model
