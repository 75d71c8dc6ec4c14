"""Llama: grouped-query attention without head norms, SwiGLU blocks, rotary frequencies scaled as in Llama 3.1."""

from __future__ import annotations

from typing import Any

from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder, fp8
from nmoe.model.families.settings import Settings

MODEL_TYPE = "llama"
PACKINGS = fp8.PACKINGS
entries = decoder.dense
ignores = decoder.ignored_always


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    settings = Settings(raw, MODEL_TYPE)
    settings.require(*decoder.SHAPE_KEYS, "intermediate_size")
    fp8.check(settings)
    settings.only("mlp_bias", False)
    return ModelConfig(
        **decoder.decoder_settings(settings),
        intermediate_size=settings.whole("intermediate_size"),
        qk_norm=False,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "LlamaForCausalLM"),
        "intermediate_size": config.intermediate_size,
        "mlp_bias": False,
    }
