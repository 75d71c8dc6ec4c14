"""The precision that a model computes in. It applies to weights, activations and the key-value cache. Routers, rotary tables,
sums within norms, logits and softmax stay in fp32, because rounding them would make sampler and learner disagree."""

from __future__ import annotations

import torch

from nmoe.config.tables.model import ExpertProfile
from nmoe.model.config import ModelConfig
from nmoe.model.expert_profile import ProfiledExperts
from nmoe.model.moe import Router
from nmoe.model.transformer import Transformer


def cast(model: Transformer, dtype: torch.dtype) -> Transformer:
    """Casts the model's parameters in place, for engine and learner, which share them. Routers stay in fp32: in bf16, 64 balancing
    biases around 4.5 would become 4 distinct values and change the routing. Buffers are not cast."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(torch.float32 if isinstance(module, Router) else dtype)
    return model


def set_expert_profile(model: Transformer, profile: ExpertProfile | None) -> Transformer:
    """Computes the routed experts with this quantisation profile from now on; None is the precision of the rest of the model.
    Trained weights do not change. Raises UserError for a model without experts, and for one whose widths the profile does not
    fit."""
    if profile is not None:
        ModelConfig.from_dict(model.config.to_dict() | {"expert_profile": profile})
    model.config = model.config.model_copy(update={"expert_profile": profile})
    for moe in model.moe_layers():
        assert moe.gate_up_packed is None, "packed experts are in the profile that they were loaded in"
        moe.profile = None if profile is None else ProfiledExperts(profile)
    return model
