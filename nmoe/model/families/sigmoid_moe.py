"""The feed-forward half of DeepSeek-V3 and of the families that use the same: sigmoid routing limited to groups of experts, with a
balancing bias, shared experts and leading dense layers.

Layers for multi-token prediction, which a release stores after the last layer, are not read: nmoe neither uses nor trains them, and
an export says that there are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder
from nmoe.model.families.base import Entry
from nmoe.model.families.settings import Settings

KEYS = (
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
)

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def mixture_settings(settings: Settings) -> dict[str, Any]:
    """Returns the settings of a ModelConfig that come from the keys in `KEYS`. Raises UserError for routing other than
    DeepSeek-V3's, and for no experts."""
    settings.refuse_alias("n_routed_experts", "num_local_experts")
    settings.only("scoring_func", "sigmoid")
    settings.only("topk_method", "noaux_tc")
    settings.only("moe_layer_freq", 1)
    if settings.whole("n_routed_experts") == 0:
        raise UserError("n_routed_experts = 0 is not a mixture")
    return {
        "intermediate_size": settings.whole("intermediate_size"),
        "dense_layers": tuple(range(min(settings.whole("first_k_dense_replace"), settings.whole("num_hidden_layers")))),
        "experts": settings.whole("n_routed_experts"),
        "experts_per_token": settings.whole("num_experts_per_tok"),
        "expert_width": settings.whole("moe_intermediate_size"),
        "shared_experts": settings.whole("n_shared_experts"),
        "router_scores": "sigmoid",
        "router_groups": settings.whole("n_group"),
        "router_groups_kept": settings.whole("topk_group"),
        "router_scale": settings.real("routed_scaling_factor"),
        "renormalize": settings.flag("norm_topk_prob"),
    }


def mixture_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Converts a configuration to the `config.json` keys in `KEYS`, with no layers for multi-token prediction."""
    return {
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
        "num_nextn_predict_layers": 0,
    }


def feed_forward(config: ModelConfig, layer: int) -> Iterator[Entry]:
    """Yields the entries of a layer's feed-forward half: router and experts, or a dense block."""
    theirs, ours = f"model.layers.{layer}.mlp.", f"blocks.{layer}.ffn."
    if layer in config.dense_layers:
        yield from decoder.swiglu(theirs, ours, config.hidden_size, config.intermediate_size)
        return
    yield Entry(theirs + "gate.weight", ours + "router.weight", (config.experts, config.hidden_size))
    yield Entry(theirs + "gate.e_score_correction_bias", ours + "router.bias", (config.experts,))
    yield from decoder.experts_one_by_one(theirs + "experts.", ours, config)
    if config.shared_experts:
        intermediate = config.shared_experts * config.expert_width
        yield from decoder.swiglu(theirs + "shared_experts.", ours + "shared.", config.hidden_size, intermediate)


def ignores(name: str, config: ModelConfig) -> bool:
    """Returns whether a checkpoint's tensor is left out: it belongs to a layer for multi-token prediction (these have numbers after
    the last layer of the model), or to the tensors that every family leaves out (`ignored_always`)."""
    layer = _LAYER.match(name)
    return (layer is not None and int(layer[1]) >= config.layers) or decoder.ignored_always(name, config)
