"""A longer context than a checkpoint was trained with: how its rotary frequencies are stretched."""

from __future__ import annotations

from dataclasses import replace

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig, RopeScaling
from nmoe.model.rope import yarn_mscale
from nmoe.model.transformer import Transformer


def extend(model: Transformer, context_tokens: int) -> None:
    """Gives a loaded model the longer context, and rotary tables for it. Raises UserError as `extended` does."""
    model.config = extended(model.config, context_tokens)
    model.reset_tables()


def extended(config: ModelConfig, context_tokens: int) -> ModelConfig:
    """The decoder with a context of this many tokens.

    Frequencies as they were trained, or stretched by YaRN already, are stretched by YaRN (arXiv:2309.00071), as transformers does
    with `rope_scaling = {"rope_type": "yarn", "factor": context_tokens / original}`. Where the checkpoint asks for `dynamic`, they
    are those that transformers computes for a sequence of `context_tokens`, for sequences of any length: a larger base. Raises
    UserError for fewer tokens than the checkpoint has, and for a scaling that says nothing about more.
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
