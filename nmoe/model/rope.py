"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Llama and Qwen."""

# Shapes: T tokens, N heads turned (query and key heads together), C dimensions turned, c = C / 2 pairs.

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig, RopeScaling


def rope_frequencies(context_tokens: int, dimensions: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Returns the rotation in radians per token of each pair of dimensions, `[dimensions / 2]` in fp64, for a model with this
    context.

    The frequencies are the same for sequences of any length, as in vLLM. If they changed while a sequence grows, as they do in
    transformers for `longrope`, cached keys would belong to another model, and learner and sampler would differ.
    """
    frequencies_c = theta ** (-torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies_c
    if scaling.kind == "longrope":
        longer = context_tokens > scaling.original_context_tokens
        factors = scaling.long_factors if longer else scaling.short_factors
        return frequencies_c / torch.tensor(factors, dtype=torch.float64)
    if scaling.kind == "linear":
        return frequencies_c / scaling.factor
    if scaling.kind == "llama3":
        turns_c = scaling.original_context_tokens * frequencies_c / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_c = ((turns_c - low) / (high - low)).clamp(0, 1)
    else:
        kept_c = 1 - _yarn_ramp(dimensions, theta, scaling)
    return frequencies_c * kept_c + frequencies_c / scaling.factor * (1 - kept_c)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor for attention over a context stretched by `factor` (arXiv:2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_ramp(dimensions: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Returns for each pair how far YaRN stretches it: 0 if it turns more than `beta_fast` times in the original context, 1 if
    fewer than `beta_slow` times, linear between (arXiv:2309.00071, section 3.2, over pairs as in its reference code)."""

    def pair_of(turns: float) -> float:
        return dimensions * math.log(scaling.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    pairs_c = torch.arange(dimensions // 2, dtype=torch.float64)
    # If the betas are swapped, high is below low and the ramp falls, as in transformers.
    return ((pairs_c - low) / ((high - low) or 0.001)).clamp(0, 1)


def rope_table(
    context_tokens: int, dimensions: int, theta: float, scaling: RopeScaling | None = None, unturned: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines `[context_tokens, (dimensions + unturned) / 2]`, computed in fp64 and kept in fp32: a table in bf16
    is a known source of sampler/learner mismatch. The `unturned` dimensions have the angle 0, which changes no bit."""
    frequencies_c = rope_frequencies(context_tokens, dimensions, theta, scaling)
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float64), frequencies_c)
    factor = scaling.attention_factor if scaling is not None and scaling.kind in ("yarn", "longrope") else 1.0
    cos, sin = (angles.cos() * factor).float(), (angles.sin() * factor).float()
    return F.pad(cos, (0, unturned // 2), value=1.0), F.pad(sin, (0, unturned // 2))


def extended(config: ModelConfig, context_tokens: int) -> ModelConfig:
    """Returns the configuration with a longer context and rotary frequencies that fit it.

    Frequencies that are unscaled, or already stretched by YaRN, are stretched by YaRN (arXiv:2309.00071), as transformers does with
    `rope_scaling = {"rope_type": "yarn", "factor": context_tokens / original}`. For a checkpoint with `dynamic` scaling, the base
    grows as transformers computes it for a sequence of `context_tokens`, but for sequences of any length. Raises UserError for
    fewer tokens than the checkpoint has, and for a scaling that does not define longer contexts.
    """
    scaling, trained = config.rope_scaling, config.context_tokens
    if context_tokens < trained:
        raise UserError(f"context_tokens = {context_tokens} is less than the {trained} that the checkpoint has")
    if context_tokens == trained:
        return config
    changes: dict[str, object] = {"context_tokens": context_tokens}
    # DeepSeek's `mscale_all_dim`: a scale of all attention logits that was made for the present factor.
    sharpened = config.latent is not None and config.attention_scale > 0
    if scaling is None:
        factor = context_tokens / trained
        changes["rope_scaling"] = RopeScaling("yarn", factor, trained, attention_factor=yarn_mscale(factor))
    elif scaling.kind == "yarn" and scaling.attention_factor == yarn_mscale(scaling.factor) and not sharpened:
        factor = context_tokens / scaling.original_context_tokens
        changes["rope_scaling"] = replace(scaling, factor=factor, attention_factor=yarn_mscale(factor))
    elif scaling.kind == "dynamic" and config.rope_dim > 2:
        grown = scaling.factor * context_tokens / scaling.original_context_tokens - (scaling.factor - 1)
        changes |= {
            "rope_theta": config.rope_theta * grown ** (config.rope_dim / (config.rope_dim - 2)),
            "rope_scaling": None,
        }
    else:
        raise UserError(
            f"context_tokens = {context_tokens}: the checkpoint's {trained} are stretched by {scaling.kind} with factors of their "
            "own, which say nothing about more"
        )
    return config.model_copy(update=changes)
