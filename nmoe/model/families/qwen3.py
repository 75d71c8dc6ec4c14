"""Qwen3, dense: grouped-query attention with QK-norm, SwiGLU blocks, full and sliding windows by layer."""

from __future__ import annotations

from typing import Any

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder, fp8
from nmoe.model.families.settings import Settings

MODEL_TYPE = "qwen3"
PACKINGS = fp8.PACKINGS
entries = decoder.dense
ignores = decoder.ignored_always

_FULL, _SLIDING = "full_attention", "sliding_attention"

# transformers' values if windows are on and these keys are missing.
_WINDOW, _FULL_LAYERS = 4096, 28


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    settings = Settings(raw, MODEL_TYPE)
    settings.require(*decoder.SHAPE_KEYS, "num_key_value_heads", "intermediate_size")
    fp8.check(settings)
    shared = {"head_dim": 128} | raw  # the family's default where the key is left out, not hidden_size / heads
    return ModelConfig(
        **decoder.decoder_settings(Settings(shared, MODEL_TYPE)),
        intermediate_size=settings.whole("intermediate_size"),
        windows=windows(settings),
    )


def windows(settings: Settings) -> tuple[int, ...]:
    """Returns the sliding window of each layer in tokens (0: none), by `layer_types` or, if missing, `max_window_layers`; empty if
    no layer has one. Raises UserError if `layer_types` is not one known kind for each layer, or asks for a window that is not
    set."""
    layers = settings.whole("num_hidden_layers")
    window = sliding_window(settings)
    settings.refuse_null("max_window_layers")
    full = settings.whole("max_window_layers", _FULL_LAYERS)
    default = [_SLIDING if window and layer >= full else _FULL for layer in range(layers)]
    kinds = settings.raw.get("layer_types", default)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise UserError(f"layer_types = {kinds!r} is not a list of {_FULL} and {_SLIDING}, one for each layer")
    if _SLIDING not in kinds:
        return ()
    if window == 0:
        raise UserError(f"layer_types asks for {_SLIDING}, and use_sliding_window and sliding_window set no window")
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def sliding_window(settings: Settings) -> int:
    """Returns the sliding window in tokens if `use_sliding_window` is on and `sliding_window` is not null, otherwise 0; the
    defaults are transformers'."""
    if not settings.flag("use_sliding_window") or "sliding_window" in settings.nulls:
        return 0
    return settings.whole("sliding_window", _WINDOW)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "Qwen3ForCausalLM"),
        "intermediate_size": config.intermediate_size,
        **windows_to_hf(config),
    }


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Converts the sliding windows to the `config.json` keys that `windows` reads."""
    window = max(config.windows, default=0)
    return {
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "max_window_layers": config.layers,
        "layer_types": [_SLIDING if config.window(layer) else _FULL for layer in range(config.layers)],
    }
