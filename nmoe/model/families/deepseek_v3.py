"""DeepSeek-V3 and Moonlight: latent attention, and the mixture of experts of `sigmoid_moe`; DeepSeek's release is in FP8."""

# Shapes: C head width.

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import LatentAttention, ModelConfig
from nmoe.model.families import decoder, fp8, sigmoid_moe
from nmoe.model.families.base import Entry
from nmoe.model.families.settings import Settings
from nmoe.model.rope import yarn_mscale

MODEL_TYPE = "deepseek_v3"
PACKINGS = fp8.PACKINGS
ignores = sigmoid_moe.ignores


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    settings = Settings(raw, str(raw.get("model_type", MODEL_TYPE)))
    settings.require(
        *decoder.SHAPE_KEYS,
        *sigmoid_moe.KEYS,
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
    fp8.check(settings)
    if "q_lora_rank" not in raw:
        raise UserError("missing keys q_lora_rank, which is null where queries have no latent")
    settings.only("attention_bias", False)
    settings.only("rope_interleave", True)
    settings.refuse_null("rope_interleave")
    shared = decoder.decoder_settings(settings)
    settings.only("num_key_value_heads", shared["heads"])
    latent = LatentAttention(
        q_rank=settings.whole("q_lora_rank", 0),
        kv_rank=settings.whole("kv_lora_rank"),
        nope_dim=settings.whole("qk_nope_head_dim"),
        rope_dim=settings.whole("qk_rope_head_dim"),
        value_dim=settings.whole("v_head_dim"),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    return ModelConfig(
        **shared | {"head_dim": head_dim, "kv_heads": shared["heads"]},
        latent=latent,
        attention_scale=_attention_scale(settings, shared, head_dim),
        qk_norm=False,
        **sigmoid_moe.mixture_settings(settings),
    )


def _attention_scale(settings: Settings, shared: dict[str, Any], head_dim: int) -> float:
    """Returns the factor of the attention logits of all dimensions, rotated or not, that YaRN's `mscale_all_dim` sharpens:
    `head_dim ** -0.5` times the square of its mscale. Returns 0, for the default factor, without scaling or without
    `mscale_all_dim`."""
    all_dim = settings.rope_section().real("mscale_all_dim", 0.0)
    if shared["rope_scaling"] is None or not all_dim:
        return 0.0
    return _scale_of(shared["rope_scaling"].factor, all_dim, head_dim)


def _scale_of(factor: float, all_dim: float, head_dim: int) -> float:
    return float(head_dim**-0.5 * yarn_mscale(factor, all_dim) ** 2)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    raw = {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "DeepseekV3ForCausalLM"),
        **sigmoid_moe.mixture_to_hf(config),
        "scoring_func": config.router_scores,
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
    }
    if (latent := config.latent) is not None:
        raw |= {
            "head_dim": latent.rope_dim,
            "q_lora_rank": latent.q_rank or None,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
        }
    if config.rope_scaling is not None and config.rope_scaling.factor > 1 and config.attention_scale:
        raw["rope_scaling"] = {**raw["rope_scaling"], **_mscales(config.rope_scaling.factor, config)}
    return raw


def _mscales(factor: float, config: ModelConfig) -> dict[str, float]:
    """Returns the `mscale` settings from which readers compute attention scale and factor, rounded to twelve digits so that values
    read from a checkpoint are written back exactly."""
    assert config.rope_scaling is not None, "the caller looks"
    sharpened = math.sqrt(config.attention_scale * config.head_dim**0.5)
    unit = 0.1 * math.log(factor)
    all_dim = (sharpened - 1) / unit
    mscale = (config.rope_scaling.attention_factor * sharpened - 1) / unit
    return {"mscale": float(f"{mscale:.12g}"), "mscale_all_dim": float(f"{all_dim:.12g}")}


def entries(config: ModelConfig) -> Iterator[Entry]:
    yield from decoder.ends(config)
    for layer in range(config.layers):
        yield from decoder.norms(config, layer)
        yield from _attention(config, layer)
        yield from sigmoid_moe.feed_forward(config, layer)


def _attention(config: ModelConfig, layer: int) -> Iterator[Entry]:
    latent = config.latent
    assert latent is not None, "a configuration of this family has it"
    theirs, ours = f"model.layers.{layer}.self_attn.", f"blocks.{layer}.attention."
    width, heads, q_rank, kv_rank, rope_dim = (
        config.hidden_size,
        config.heads,
        latent.q_rank,
        latent.kv_rank,
        latent.rope_dim,
    )
    if q_rank:
        yield Entry(theirs + "q_a_proj.weight", ours + "q_a_proj.weight", (q_rank, width))
        yield Entry(theirs + "q_a_layernorm.weight", ours + "q_a_norm.weight", (q_rank,))
    yield Entry(
        theirs + ("q_b_proj.weight" if q_rank else "q_proj.weight"),
        ours + "q_proj.weight",
        (heads * config.head_dim, q_rank or width),
        (),
        *decoder.reordered(_rope_order(config.head_dim, rope_dim)),
    )
    yield Entry(
        theirs + "kv_a_proj_with_mqa.weight",
        ours + "kv_a_proj.weight",
        (kv_rank + rope_dim, width),
        (),
        *decoder.reordered(_rope_order(kv_rank + rope_dim, rope_dim)),
    )
    yield Entry(theirs + "kv_a_layernorm.weight", ours + "kv_a_norm.weight", (kv_rank,))
    expanded = heads * (latent.nope_dim + latent.value_dim)
    yield Entry(theirs + "kv_b_proj.weight", ours + "kv_b_proj.weight", (expanded, kv_rank))
    yield Entry(theirs + "o_proj.weight", ours + "o_proj.weight", (width, heads * latent.value_dim))


def _rope_order(head_dim: int, rope_dim: int) -> Tensor:
    """Returns the order of a head's rows for the half-split layout of `nmoe.model.rope`. The release turns the pairs (0, 1), (2,
    3), ... of the last `rope_dim` rows of every head; we turn (0, R/2), (1, R/2 + 1), .... The products are the same if queries and
    keys are reordered alike."""
    first = head_dim - rope_dim
    order_C = torch.arange(head_dim)
    order_C[first:] = torch.cat([order_C[first::2], order_C[first + 1 :: 2]])
    return order_C
