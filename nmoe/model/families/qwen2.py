"""Qwen2 and Qwen2.5, dense: grouped-query attention with biases on queries, keys and values, SwiGLU blocks, full and sliding
windows by layer."""

from __future__ import annotations

from typing import Any

from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder, fp8, qwen3
from nmoe.model.families.settings import Settings

MODEL_TYPE = "qwen2"
PACKINGS = fp8.PACKINGS
entries = decoder.dense
ignores = decoder.ignored_always


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    settings = Settings(raw, MODEL_TYPE)
    settings.require(*decoder.SHAPE_KEYS, "num_key_value_heads", "intermediate_size")
    fp8.check(settings)
    return ModelConfig(
        # The biases are no setting: all releases have these and no others.
        **decoder.decoder_settings(settings) | {"qkv_bias": True, "output_bias": False},
        intermediate_size=settings.whole("intermediate_size"),
        qk_norm=False,
        windows=qwen3.windows(settings),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "Qwen2ForCausalLM"),
        "intermediate_size": config.intermediate_size,
        **qwen3.windows_to_hf(config),
    }
