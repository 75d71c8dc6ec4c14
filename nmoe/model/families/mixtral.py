"""Mixtral: Mistral's attention, and in every layer a mixture of experts with a softmax router, where the chosen experts' weights
sum to 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder, fp8
from nmoe.model.families.base import Entry
from nmoe.model.families.mistral import one_window
from nmoe.model.families.settings import Settings

MODEL_TYPE = "mixtral"
PACKINGS = fp8.PACKINGS
ignores = decoder.ignored_always

# The base of the rotary frequencies where the key is missing, as in transformers.
_THETA = 1_000_000.0


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    settings = Settings(raw, MODEL_TYPE)
    settings.refuse_alias("num_local_experts", "num_experts")
    settings.require(
        *decoder.SHAPE_KEYS, "num_key_value_heads", "intermediate_size", "num_local_experts", "num_experts_per_tok"
    )
    fp8.check(settings)
    if settings.whole("num_local_experts") == 0:
        raise UserError("num_local_experts = 0 is not a mixture; a dense model of this kind is model_type mistral")
    return ModelConfig(
        **decoder.decoder_settings(settings, theta=_THETA) | decoder.NO_BIASES,
        experts=settings.whole("num_local_experts"),
        experts_per_token=settings.whole("num_experts_per_tok"),
        expert_width=settings.whole("intermediate_size"),
        qk_norm=False,
        windows=one_window(settings, 0),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "MixtralForCausalLM"),
        "intermediate_size": config.expert_width,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "sliding_window": config.window(0) or None,
    }


def entries(config: ModelConfig) -> Iterator[Entry]:
    yield from decoder.ends(config)
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.block_sparse_moe.", f"blocks.{layer}.ffn."
        yield from decoder.norms(config, layer)
        yield from decoder.attention(config, layer)
        yield Entry(theirs + "gate.weight", ours + "router.weight", (config.experts, config.hidden_size))
        yield from decoder.experts_one_by_one(theirs + "experts.", ours, config, ("w1", "w3", "w2"))
