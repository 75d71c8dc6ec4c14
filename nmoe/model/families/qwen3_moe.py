"""Qwen3-MoE: grouped-query attention with QK-norm, softmax router, SwiGLU experts saved one by one; some layers may be
dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder, fp8
from nmoe.model.families.base import Entry
from nmoe.model.families.qwen3 import sliding_window
from nmoe.model.families.settings import Settings

MODEL_TYPE = "qwen3_moe"
PACKINGS = fp8.PACKINGS
ignores = decoder.ignored_always


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    Settings(raw, MODEL_TYPE).refuse_alias("num_experts", "num_local_experts")
    if "num_local_experts" in raw:  # as transformers 5 writes it; the released checkpoints have num_experts
        raw = {"num_experts": raw["num_local_experts"], **raw}
    settings = Settings(raw, MODEL_TYPE)
    settings.require(
        *decoder.SHAPE_KEYS, "num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size"
    )
    fp8.check(settings)
    layers, step = settings.whole("num_hidden_layers"), settings.whole("decoder_sparse_step", 1)
    if step == 0:
        raise UserError("decoder_sparse_step = 0 is not a whole number from 1 up")
    if settings.whole("num_experts") == 0:
        raise UserError("num_experts = 0 is not a mixture; a dense model of this kind is model_type qwen3")
    dense = settings.wholes("mlp_only_layers")
    window = sliding_window(settings)
    return ModelConfig(
        **decoder.decoder_settings(settings),
        intermediate_size=settings.whole("intermediate_size", 0),
        experts=settings.whole("num_experts"),
        experts_per_token=settings.whole("num_experts_per_tok"),
        expert_width=settings.whole("moe_intermediate_size"),
        dense_layers=tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step),
        renormalize=settings.flag("norm_topk_prob"),
        windows=(window,) * layers if window else (),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    window = config.window(0)
    return {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "Qwen3MoeForCausalLM"),
        "intermediate_size": config.intermediate_size,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_width,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": config.renormalize,
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
    }


def entries(config: ModelConfig) -> Iterator[Entry]:
    yield from decoder.ends(config)
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.mlp.", f"blocks.{layer}.ffn."
        yield from decoder.norms(config, layer)
        yield from decoder.attention(config, layer)
        if layer in config.dense_layers:
            yield from decoder.swiglu(theirs, ours, config.hidden_size, config.intermediate_size)
        else:
            yield Entry(theirs + "gate.weight", ours + "router.weight", (config.experts, config.hidden_size))
            yield from decoder.experts_one_by_one(theirs + "experts.", ours, config)
