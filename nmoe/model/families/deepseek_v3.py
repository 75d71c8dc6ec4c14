"""DeepSeek-V3 and Moonlight: latent attention, sigmoid routing limited to groups of experts, shared experts, leading dense
layers; in FP8 where DeepSeek released it.

The layers for multi-token prediction, which a release stores after the last layer, are not read: nothing here uses or trains
them, and an export says that it has none.
"""

# Shapes: N a product's outputs, D its inputs, H heads, C head width.

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import LatentAttention, ModelConfig
from nmoe.model.families import decoder
from nmoe.model.families.base import Entry, Packing
from nmoe.model.families.settings import Settings, yarn_mscale

MODEL_TYPE = "deepseek_v3"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

# Rows and columns that share a scale in FP8 storage.
_FP8_BLOCK = 128


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    settings = Settings(raw, MODEL_TYPE)
    settings.require(
        *decoder.SHAPE_KEYS,
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "norm_topk_prob",
        "first_k_dense_replace",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
    if "q_lora_rank" not in raw:
        raise UserError("missing keys q_lora_rank, which is null where queries have no latent of their own")
    settings.only("attention_bias", False)
    settings.only("rope_interleave", True)
    settings.refuse_null("rope_interleave")
    settings.refuse_alias("n_routed_experts", "num_local_experts")
    settings.only("scoring_func", "sigmoid")
    settings.only("topk_method", "noaux_tc")
    settings.only("moe_layer_freq", 1)
    shared = decoder.decoder_settings(settings, "fp8")
    settings.section("quantization_config").only("weight_block_size", [_FP8_BLOCK, _FP8_BLOCK])
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
        intermediate_size=settings.whole("intermediate_size"),
        dense_layers=tuple(range(min(settings.whole("first_k_dense_replace"), shared["layers"]))),
        experts=settings.whole("n_routed_experts"),
        experts_per_token=settings.whole("num_experts_per_tok"),
        expert_width=settings.whole("moe_intermediate_size"),
        shared_experts=settings.whole("n_shared_experts"),
        router_scores="sigmoid",
        router_groups=settings.whole("n_group"),
        router_groups_kept=settings.whole("topk_group"),
        router_scale=settings.real("routed_scaling_factor"),
        renormalize=settings.flag("norm_topk_prob"),
    )


def _attention_scale(settings: Settings, shared: dict[str, Any], head_dim: int) -> float:
    """The factor by which YaRN sharpens the attention logits of all dimensions, rotated or not; 0 for none."""
    all_dim = settings.rope_section().real("mscale_all_dim", 0.0)
    if shared["rope_scaling"] is None or not all_dim:
        return 0.0
    return _scale_of(shared["rope_scaling"].factor, all_dim, head_dim)


def _scale_of(factor: float, all_dim: float, head_dim: int) -> float:
    return float(head_dim**-0.5 * yarn_mscale(factor, all_dim) ** 2)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    raw = {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "DeepseekV3ForCausalLM"),
        "intermediate_size": config.intermediate_size,
        "first_k_dense_replace": len(config.dense_layers),
        "moe_intermediate_size": config.expert_width,
        "n_routed_experts": config.experts,
        "n_shared_experts": config.shared_experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_group": config.router_groups,
        "topk_group": config.router_groups_kept,
        "routed_scaling_factor": config.router_scale,
        "norm_topk_prob": config.renormalize,
        "scoring_func": config.router_scores,
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
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
    """The settings from which readers compute attention scale and factor, rounded to twelve digits so that values read from a
    checkpoint come back exactly."""
    assert config.rope_scaling is not None, "the caller looks"
    sharpened = math.sqrt(config.attention_scale * config.head_dim**0.5)
    unit = 0.1 * math.log(factor)
    all_dim = (sharpened - 1) / unit
    mscale = (config.rope_scaling.attention_factor * sharpened - 1) / unit
    return {"mscale": float(f"{mscale:.12g}"), "mscale_all_dim": float(f"{all_dim:.12g}")}


def entries(config: ModelConfig) -> Iterator[Entry]:
    yield from decoder.ends(config)
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.mlp.", f"blocks.{layer}.ffn."
        yield from decoder.norms(config, layer)
        yield from _attention(config, layer)
        if layer in config.dense_layers:
            yield from decoder.swiglu(theirs, ours, config.hidden_size, config.intermediate_size)
            continue
        yield Entry(theirs + "gate.weight", ours + "router.weight", (config.experts, config.hidden_size))
        yield Entry(theirs + "gate.e_score_correction_bias", ours + "router.bias", (config.experts,))
        yield from decoder.experts_one_by_one(theirs + "experts.", ours, config)
        if config.shared_experts:
            intermediate = config.shared_experts * config.expert_width
            yield from decoder.swiglu(theirs + "shared_experts.", ours + "shared.", config.hidden_size, intermediate)


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
        *_rope_rows(config.head_dim, rope_dim),
    )
    yield Entry(
        theirs + "kv_a_proj_with_mqa.weight",
        ours + "kv_a_proj.weight",
        (kv_rank + rope_dim, width),
        (),
        *_rope_rows(kv_rank + rope_dim, rope_dim),
    )
    yield Entry(theirs + "kv_a_layernorm.weight", ours + "kv_a_norm.weight", (kv_rank,))
    expanded = heads * (latent.nope_dim + latent.value_dim)
    yield Entry(theirs + "kv_b_proj.weight", ours + "kv_b_proj.weight", (expanded, kv_rank))
    yield Entry(theirs + "o_proj.weight", ours + "o_proj.weight", (width, heads * latent.value_dim))


def _rope_rows(head_dim: int, rope_dim: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Converts to and from the half-split layout of `nmoe.model.rope`. The release turns the pairs (0, 1), (2, 3), ... of the
    last `rope_dim` rows of every head; we turn (0, R/2), (1, R/2 + 1), .... The products are the same if queries and keys are
    reordered alike."""
    first = head_dim - rope_dim
    order_C = torch.arange(head_dim)
    order_C[first:] = torch.cat([order_C[first::2], order_C[first + 1 :: 2]])
    back_C = order_C.argsort()

    def read(weight_ND: Tensor) -> Tensor:
        return weight_ND.unflatten(0, (-1, head_dim)).index_select(1, order_C.to(weight_ND.device)).flatten(0, 1)

    def write(weight_ND: Tensor) -> Tensor:
        return weight_ND.unflatten(0, (-1, head_dim)).index_select(1, back_C.to(weight_ND.device)).flatten(0, 1)

    return read, write


def ignores(name: str, config: ModelConfig) -> bool:
    """Ignores layers for multi-token prediction, whose numbers follow the last layer's."""
    layer = _LAYER.match(name)
    return (layer is not None and int(layer[1]) >= config.layers) or decoder.ignored_always(name, config)


def dequantised(weight_ND: Tensor, scales: Tensor) -> Tensor:
    """A weight `[N, D]` in fp32 from FP8 (E4M3) and one factor for each 128 x 128 of it; the last blocks may be cut off.

    Raises UserError if the two do not match.
    """
    wanted = tuple(-(-size // _FP8_BLOCK) for size in weight_ND.shape)
    if weight_ND.dtype != torch.float8_e4m3fn or weight_ND.dim() != 2 or scales.shape != wanted:
        raise UserError(
            f"{weight_ND.dtype} {list(weight_ND.shape)} with weight_scale_inv {list(scales.shape)} is not FP8 in blocks of "
            f"{_FP8_BLOCK} x {_FP8_BLOCK}"
        )
    out_ND = weight_ND.float()
    for first, row in zip(range(0, weight_ND.shape[0], _FP8_BLOCK), scales.float(), strict=True):
        out_ND[first : first + _FP8_BLOCK] *= row.repeat_interleave(_FP8_BLOCK)[: weight_ND.shape[1]]
    return out_ND


PACKINGS: tuple[Packing, ...] = (Packing(("", "_scale_inv"), dequantised),)
