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
    model.to(getattr(torch, precision))
    for module in model.modules():
        if isinstance(module, Router):
            module.float()
    model.reset_tables()
    return model
