"""gpt-oss: attention sinks, a sliding window in every other layer, biases everywhere, experts saved fused with gate and up
interleaved, in MXFP4 where OpenAI released them."""

# Shapes: E experts, N a product's outputs.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder
from nmoe.model.families.base import Entry, Packing, identity
from nmoe.model.families.settings import Settings
from nmoe.model.mxfp4 import BLOCK, dequantised

MODEL_TYPE = "gpt_oss"
ignores = decoder.ignored_always

# Defaults, as in transformers, for a config.json without positions or windows.
_THETA, _WINDOW = 150_000.0, 128
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw = {**raw, "rope_scaling": _ROPE}
    settings = Settings(raw, MODEL_TYPE)
    settings.refuse_alias("num_local_experts", "num_experts")
    settings.require(
        *decoder.SHAPE_KEYS, "head_dim", "intermediate_size", "num_local_experts", "num_experts_per_tok", "swiglu_limit"
    )
    settings.only("swiglu_alpha", 1.702)
    limit, biases = settings.real("swiglu_limit"), settings.flag("attention_bias", True)
    if limit <= 0:
        raise UserError(f"swiglu_limit = {limit} is not positive")
    settings.refuse_quantised("mxfp4")
    shared = decoder.decoder_settings(settings, _THETA)
    return ModelConfig(
        **shared | {"qkv_bias": biases, "output_bias": biases},
        experts=settings.whole("num_local_experts"),
        experts_per_token=settings.whole("num_experts_per_tok"),
        expert_width=settings.whole("intermediate_size"),
        expert_bias=True,
        router_linear_bias=True,
        swiglu_limit=limit,
        sinks=True,
        windows=_windows(settings, shared["layers"]),
        qk_norm=False,
    )


def _windows(settings: Settings, layers: int) -> tuple[int, ...]:
    kinds = settings.raw.get("layer_types", [("sliding_attention", "full_attention")[i % 2] for i in range(layers)])
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise UserError(
            f"layer_types = {kinds!r} does not name one of sliding_attention and full_attention for each of {layers} layers"
        )
    if "sliding_attention" not in kinds:
        return ()
    settings.refuse_null("sliding_window")
    window = settings.whole("sliding_window", _WINDOW)
    if window == 0:
        raise UserError("sliding_window = 0 leaves nothing to attend to")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    windows = [config.window(layer) for layer in range(config.layers)]
    raw = {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "GptOssForCausalLM"),
        "intermediate_size": config.expert_width,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "swiglu_limit": config.swiglu_limit,
        # transformers requires it even if no layer has a window.
        "sliding_window": max(windows) or _WINDOW,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }
    # None would mean the release's scaling.
    return raw if config.rope_scaling is not None else raw | {"rope_scaling": {"rope_type": "default"}}


def entries(config: ModelConfig) -> Iterator[Entry]:
    experts, width, intermediate = config.experts, config.hidden_size, config.expert_width
    yield from decoder.ends(config)
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        yield from decoder.norms(config, layer)
        yield from decoder.attention(config, layer)
        yield Entry(theirs + "self_attn.sinks", ours + "attention.sinks", (config.heads,))
        theirs, ours = theirs + "mlp.", ours + "ffn."
        yield Entry(theirs + "router.weight", ours + "router.weight", (experts, width))
        yield Entry(theirs + "router.bias", ours + "router.linear_bias", (experts,))
        theirs += "experts."
        for name, shape in (("", (experts, width, 2 * intermediate)), ("_bias", (experts, 2 * intermediate))):
            yield Entry(
                f"{theirs}gate_up_proj{name}", f"{ours}gate_up{name}", shape, (), halves, interleaved, stacked=True
            )
        yield Entry(theirs + "down_proj", ours + "down", (experts, intermediate, width), stacked=True)
        yield Entry(theirs + "down_proj_bias", ours + "down_bias", (experts, width))


def halves(gate_up: Tensor) -> Tensor:
    """Separates gate and up on the last axis: columns 0, 2, 4, ..., then 1, 3, 5, ..."""
    return gate_up.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def interleaved(gate_up: Tensor) -> Tensor:
    """Interleaves gate and up on the last axis: the inverse of `halves`."""
    return gate_up.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def packed_entries(config: ModelConfig) -> Iterator[Entry]:
    """Yields the entries for a model whose experts stay in MXFP4. Gate and up are separated by moving whole rows of blocks."""
    for entry in entries(config):
        if not entry.ours.endswith(("ffn.gate_up", "ffn.down")):
            yield entry
            continue
        experts, inputs, outputs = entry.shape
        rows = (experts, outputs, inputs // BLOCK)
        read = _halves_of_rows if entry.read is halves else identity
        for part, shape in (("blocks", (*rows, BLOCK // 2)), ("scales", rows)):
            yield Entry(
                f"{entry.theirs}_{part}", f"{entry.ours}_packed.{part}", shape, (), read, stacked=True, packed=True
            )


def _halves_of_rows(rows_EN: Tensor) -> Tensor:
    """Separates gate and up on the second axis, as `halves` does on the last."""
    return rows_EN.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


PACKINGS: tuple[Packing, ...] = (Packing(("_blocks", "_scales"), dequantised),)
