"""GLM-4.5: grouped-query attention with partial rotary embedding, biases and optional QK-norm; the mixture of experts of
`sigmoid_moe`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder, fp8, sigmoid_moe
from nmoe.model.families.base import Entry
from nmoe.model.families.settings import Settings

MODEL_TYPE = "glm4_moe"
PACKINGS = fp8.PACKINGS
ignores = sigmoid_moe.ignores

# The part of a head that is turned where the key is missing, as in transformers.
_ROTARY_SHARE = 0.5


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    settings = Settings(raw, MODEL_TYPE)
    settings.require(*decoder.SHAPE_KEYS, "num_key_value_heads", *sigmoid_moe.KEYS)
    fp8.check(settings)
    return ModelConfig(
        # attention_bias is about queries, keys and values alone.
        **decoder.decoder_settings(settings, rotary_share=_ROTARY_SHARE) | {"output_bias": False},
        **sigmoid_moe.mixture_settings(settings),
        qk_norm=settings.flag("use_qk_norm"),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "Glm4MoeForCausalLM"),
        **sigmoid_moe.mixture_to_hf(config),
        "partial_rotary_factor": config.rope_dim / config.head_dim,
        "use_qk_norm": config.qk_norm,
    }


def entries(config: ModelConfig) -> Iterator[Entry]:
    yield from decoder.ends(config)
    for layer in range(config.layers):
        yield from decoder.norms(config, layer)
        yield from decoder.attention(config, layer)
        yield from sigmoid_moe.feed_forward(config, layer)
