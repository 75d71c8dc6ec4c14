"""Mistral: grouped-query attention without biases or head norms, SwiGLU blocks, one sliding window for all layers or none.

Without a window it is the same decoder as Llama, under the same names: such a model is exported as `llama`.
"""

from __future__ import annotations

from typing import Any

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder, fp8
from nmoe.model.families.settings import Settings

MODEL_TYPE = "mistral"
PACKINGS = fp8.PACKINGS
entries = decoder.dense
ignores = decoder.ignored_always

# transformers' value where the key is missing; null is no window.
_WINDOW = 4096


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    settings = Settings(raw, MODEL_TYPE)
    settings.require(*decoder.SHAPE_KEYS, "num_key_value_heads", "intermediate_size")
    fp8.check(settings)
    # transformers reads no windows by layer in this family; a file that has them is another model's.
    settings.only("layer_types")
    return ModelConfig(
        **decoder.decoder_settings(settings) | decoder.NO_BIASES,
        intermediate_size=settings.whole("intermediate_size"),
        qk_norm=False,
        windows=one_window(settings, _WINDOW),
    )


def one_window(settings: Settings, default: int) -> tuple[int, ...]:
    """Returns `sliding_window` for every layer, or () if it is null. `default` is for a missing key; a default of 0 means no
    window. Raises UserError for an explicit `sliding_window = 0`, with which no token would see any."""
    window = 0 if "sliding_window" in settings.nulls else settings.whole("sliding_window", default)
    if settings.raw.get("sliding_window") == 0:
        raise UserError("sliding_window = 0 leaves nothing to attend to")
    return (window,) * settings.whole("num_hidden_layers") if window else ()


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "MistralForCausalLM"),
        "intermediate_size": config.intermediate_size,
        "sliding_window": config.window(0) or None,
    }
