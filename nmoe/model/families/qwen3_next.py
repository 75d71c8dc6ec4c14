"""Qwen3-Next: Gated DeltaNet in most layers, and gated attention with partial rotary embedding in the others; norms that scale by
one plus their weight; experts saved one by one, and a shared expert with a gate.

The tensors for multi-token prediction, `mtp.*` in a release, are not read: nmoe neither uses nor trains them.
"""

# Shapes: D width, W channels of the convolution, K its tokens.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import DeltaNet, ModelConfig
from nmoe.model.families import decoder, fp8
from nmoe.model.families.base import Entry
from nmoe.model.families.settings import Settings

MODEL_TYPE = "qwen3_next"
PACKINGS = fp8.PACKINGS

_RECURRENT, _FULL = "linear_attention", "full_attention"

# Defaults, as in transformers.
_ROTARY_SHARE, _INTERVAL, _HEAD_DIM = 0.25, 4, 256
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    Settings(raw, MODEL_TYPE).refuse_alias("num_experts", "num_local_experts")
    settings = Settings({"head_dim": _HEAD_DIM} | raw, MODEL_TYPE)
    settings.require(
        *decoder.SHAPE_KEYS,
        "num_key_value_heads",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    )
    fp8.check(settings)
    layers, step = settings.whole("num_hidden_layers"), settings.whole("decoder_sparse_step", 1)
    if step == 0:
        raise UserError("decoder_sparse_step = 0 is not a whole number from 1 up")
    if settings.whole("num_experts") == 0:
        raise UserError(f"{MODEL_TYPE}: num_experts = 0 is not a mixture")
    width, shared = settings.whole("moe_intermediate_size"), settings.whole("shared_expert_intermediate_size")
    if width == 0 or shared == 0 or shared % width:
        raise UserError(
            f"{MODEL_TYPE}: shared_expert_intermediate_size = {shared} is not a multiple of moe_intermediate_size = {width}"
        )
    dense, recurrent = settings.wholes("mlp_only_layers"), _recurrent_layers(settings, layers)
    return ModelConfig(
        **decoder.decoder_settings(settings, rotary_share=_ROTARY_SHARE),
        intermediate_size=settings.whole("intermediate_size", 0),
        experts=settings.whole("num_experts"),
        experts_per_token=settings.whole("num_experts_per_tok"),
        expert_width=width,
        shared_experts=shared // width,
        shared_gate=True,
        dense_layers=tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step),
        renormalize=settings.flag("norm_topk_prob", True),
        norm_offset=True,
        attention_gate=True,
        recurrent_layers=recurrent,
        delta=DeltaNet(*(settings.whole(key, default) for key, default in _DELTA.items())) if recurrent else None,
    )


def _recurrent_layers(settings: Settings, layers: int) -> tuple[int, ...]:
    settings.refuse_null("full_attention_interval", *_DELTA)
    interval = settings.whole("full_attention_interval", _INTERVAL)
    if interval == 0:
        raise UserError("full_attention_interval = 0 is not a whole number from 1 up")
    default = [_RECURRENT if (layer + 1) % interval else _FULL for layer in range(layers)]
    kinds = settings.raw.get("layer_types", default)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_FULL, _RECURRENT) for kind in kinds):
        raise UserError(f"layer_types = {kinds!r} is not a list of {_FULL} and {_RECURRENT}, one for each layer")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _RECURRENT)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    delta = config.delta or DeltaNet(*_DELTA.values())
    shape = (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.conv_tokens)
    recurrent = config.recurrent_layers
    return {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "Qwen3NextForCausalLM"),
        "partial_rotary_factor": config.rope_dim / config.head_dim,
        "intermediate_size": config.intermediate_size,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_width,
        "shared_expert_intermediate_size": config.shared_experts * config.expert_width,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": config.renormalize,
        "layer_types": [_RECURRENT if layer in recurrent else _FULL for layer in range(config.layers)],
        **dict(zip(_DELTA, shape, strict=True)),
    }


def entries(config: ModelConfig) -> Iterator[Entry]:
    yield from decoder.ends(config)
    for layer in range(config.layers):
        yield from decoder.norms(config, layer)
        if layer in config.recurrent_layers:
            yield from _delta_net(config, layer)
        else:
            yield from decoder.attention(config, layer)
        theirs, ours = f"model.layers.{layer}.mlp.", f"blocks.{layer}.ffn."
        if layer in config.dense_layers:
            yield from decoder.swiglu(theirs, ours, config.hidden_size, config.intermediate_size)
            continue
        yield Entry(theirs + "gate.weight", ours + "router.weight", (config.experts, config.hidden_size))
        yield from decoder.experts_one_by_one(theirs + "experts.", ours, config)
        shared = config.shared_experts * config.expert_width
        yield from decoder.swiglu(theirs + "shared_expert.", ours + "shared.", config.hidden_size, shared)
        yield Entry(theirs + "shared_expert_gate.weight", ours + "shared_gate.weight", (1, config.hidden_size))


def _delta_net(config: ModelConfig, layer: int) -> Iterator[Entry]:
    assert config.delta is not None, "the caller looks"
    delta, width = config.delta, config.hidden_size
    theirs, ours = f"model.layers.{layer}.linear_attn.", f"blocks.{layer}.attention."
    of_head = delta.value_heads // delta.key_heads
    values = of_head * delta.value_dim
    order, gates = (
        decoder.reordered(_by_kind(delta.key_heads, widths))
        for widths in ((delta.key_dim, delta.key_dim, values, values), (of_head, of_head))
    )
    rows = delta.channels + delta.values
    yield Entry(theirs + "in_proj_qkvz.weight", ours + "in_proj.weight", (rows, width), (), *order)
    yield Entry(theirs + "in_proj_ba.weight", ours + "gate_proj.weight", (2 * delta.value_heads, width), (), *gates)
    shape = (delta.channels, 1, delta.conv_tokens)
    yield Entry(theirs + "conv1d.weight", ours + "conv", shape, (), _without_groups, _with_groups)
    yield Entry(theirs + "A_log", ours + "decay_log", (delta.value_heads,))
    yield Entry(theirs + "dt_bias", ours + "decay_bias", (delta.value_heads,))
    yield Entry(theirs + "norm.weight", ours + "norm.weight", (delta.value_dim,))
    yield Entry(theirs + "out_proj.weight", ours + "o_proj.weight", (width, delta.values))


def _by_kind(key_heads: int, widths: tuple[int, ...]) -> Tensor:
    """Returns the order that groups rows by kind (such as all queries, then all keys). They are saved key head by key head;
    `widths` are each head's numbers of rows of each kind."""
    rows = torch.arange(key_heads * sum(widths)).view(key_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(widths, 1)])


def _without_groups(conv_W1K: Tensor) -> Tensor:
    return conv_W1K.squeeze(1)


def _with_groups(conv_WK: Tensor) -> Tensor:
    return conv_WK.unsqueeze(1)


def ignores(name: str, config: ModelConfig) -> bool:
    """Returns whether the tensor may be ignored: weights of multi-token prediction, or as in `ignored_always`."""
    return name.startswith("mtp.") or decoder.ignored_always(name, config)
