"""Gemma 3, text: norms before and after attention and feed-forward that scale by one plus their weight, QK-norm, GeGLU, scaled
embeddings. Of six layers, five have a sliding window and separate rotary frequencies.

The larger releases also read images, under `model_type` gemma3; these are not supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder, fp8
from nmoe.model.families.base import Entry
from nmoe.model.families.settings import Settings

MODEL_TYPE = "gemma3_text"
PACKINGS = fp8.PACKINGS
ignores = decoder.ignored_always

_FULL, _SLIDING = "full_attention", "sliding_attention"

# transformers' values where keys are missing.
_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_THETA, _WINDOW_THETA, _WINDOW, _PATTERN, _SCALAR = 1_000_000.0, 10_000.0, 4096, 6, 256


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    settings = Settings(raw, MODEL_TYPE)
    settings.require(*decoder.SHAPE_KEYS, "num_key_value_heads", "intermediate_size")
    fp8.check(settings)
    settings.only("hidden_activation", "gelu_pytorch_tanh")
    settings.refuse_null(*_DEFAULTS, "hidden_activation", "query_pre_attn_scalar", "rope_theta", "rope_local_base_freq")
    for capping in ("final_logit_softcapping", "attn_logit_softcapping"):
        settings.only(capping)
    settings.only("use_bidirectional_attention", False)
    far, near = _rope(settings)
    shared = decoder.decoder_settings(
        Settings(_DEFAULTS | {key: value for key, value in raw.items() if key not in _ROPE_KEYS} | far, MODEL_TYPE)
    )
    windows = _windows(settings)
    window_theta, scaling = Settings(near, MODEL_TYPE).rope()
    if scaling is not None:
        raise UserError(f"{MODEL_TYPE}: scaled rotary frequencies of {_SLIDING} are not supported")
    scalar = settings.real("query_pre_attn_scalar", _SCALAR)
    if scalar <= 0:
        raise UserError(f"query_pre_attn_scalar = {scalar} is not positive")
    return ModelConfig(
        **shared,
        intermediate_size=settings.whole("intermediate_size"),
        windows=windows,
        window_rope_theta=window_theta if windows else 0.0,
        attention_scale=0.0 if scalar == shared["head_dim"] else scalar**-0.5,
        gelu=True,
        output_norms=True,
        norm_offset=True,
        scale_embedding=True,
    )


# The last has no meaning for rotary settings by kind of layer.
_ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "original_max_position_embeddings",
)


def _rope(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rotary settings of layers without and with a window, merged as transformers merges them: settings by kind of
    layer (`rope_parameters`), which it writes now, come before the released checkpoints' bases, `rope_theta` and
    `rope_local_base_freq`, but `rope_scaling` comes before the settings of layers without a window. Raises UserError for other
    kinds of layers, and for `truncate` off."""
    kinds = settings.section("rope_parameters")
    if other := sorted(kinds.raw.keys() - {_FULL, _SLIDING}):
        raise UserError(f"{MODEL_TYPE}: rope_parameters has {other[0]!r} beside {_FULL} and {_SLIDING}")
    far = kinds.section(_FULL).raw or {"rope_type": "default"}
    near = kinds.section(_SLIDING).raw or {"rope_type": "default"}
    far = {"rope_theta": settings.real("rope_theta", _THETA)} | far | settings.section("rope_scaling").raw
    near = {"rope_theta": settings.real("rope_local_base_freq", _WINDOW_THETA)} | near
    # transformers looks for `truncate` outside of the settings by kind, where it never is.
    Settings(far, MODEL_TYPE).only("truncate", True)
    context = {"max_position_embeddings": settings.whole("max_position_embeddings")}
    return {"rope_parameters": far}, {"rope_parameters": near} | context


def _windows(settings: Settings) -> tuple[int, ...]:
    layers = settings.whole("num_hidden_layers")
    settings.refuse_null("sliding_window_pattern")
    pattern = settings.whole("sliding_window_pattern", _PATTERN)
    if pattern == 0:
        raise UserError("sliding_window_pattern = 0 is not a whole number from 1 up")
    default = [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(layers)]
    kinds = settings.raw.get("layer_types", default)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise UserError(f"layer_types = {kinds!r} is not a list of {_FULL} and {_SLIDING}, one for each layer")
    if _SLIDING not in kinds:
        return ()
    settings.refuse_null("sliding_window")
    window = settings.whole("sliding_window", _WINDOW)
    if window == 0:
        raise UserError("sliding_window = 0 leaves nothing to attend to")
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    scalar = float(f"{config.scale**-2:.12g}")
    raw = {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "Gemma3ForCausalLM"),
        "intermediate_size": config.intermediate_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "sliding_window": max(config.windows, default=0) or _WINDOW,
        "layer_types": [_SLIDING if config.window(layer) else _FULL for layer in range(config.layers)],
        "rope_local_base_freq": config.window_rope_theta or _WINDOW_THETA,
    }
    del raw["hidden_act"]
    return raw


def entries(config: ModelConfig) -> Iterator[Entry]:
    yield from decoder.ends(config)
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        for name, norm in (
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "attention_output_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "ffn_output_norm"),
        ):
            yield Entry(f"{theirs}{name}.weight", f"{ours}{norm}.weight", (config.hidden_size,))
        yield from decoder.attention(config, layer)
        yield from decoder.swiglu(f"{theirs}mlp.", f"{ours}ffn.", config.hidden_size, config.intermediate_size)
