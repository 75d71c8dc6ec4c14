"""Qwen3-MoE: softmax router, QK-norm, SwiGLU experts saved one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig

MODEL_TYPE = "qwen3_moe"

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "rms_norm_eps",
)


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """The decoder that a Qwen3-MoE `config.json` describes. Raises UserError for features the family has but nmoe lacks, and
    for missing keys."""
    if "num_local_experts" in raw:  # as transformers 5 writes it; the released checkpoints have num_experts
        raw = {"num_experts": raw["num_local_experts"], **raw}
    if missing := [key for key in _REQUIRED if key not in raw]:
        raise UserError(f"missing keys {', '.join(missing)}")
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            "qwen3_moe: mlp_only_layers and decoder_sparse_step other than 1 (dense layers among MoE layers) are not supported"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10_000.0)}
    rope |= raw.get("rope_parameters") or {}
    if rope["rope_type"] != "default" or raw.get("rope_scaling"):
        raise UserError(f"qwen3_moe: rope type {rope['rope_type']!r} is not supported")
    if raw.get("attention_bias") or raw.get("use_sliding_window"):
        raise UserError("qwen3_moe: attention_bias and use_sliding_window are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"qwen3_moe: hidden_act = {raw['hidden_act']!r} is not supported, experts are SwiGLU (silu)")
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        context_tokens=raw["max_position_embeddings"],
        experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        renormalize=raw.get("norm_topk_prob", False),
        qk_norm=True,
        tie_embeddings=raw.get("tie_word_embeddings", False),
        rope_theta=rope["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
    )


def weights_from_hf(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """nmoe's state dict from the family's saved tensors. Raises UserError naming a tensor that is missing, of the wrong shape, or
    not of this architecture."""
    unread = set(tensors)

    def take(name: str, *shape: int) -> Tensor:
        if name not in tensors:
            raise UserError(f"not a checkpoint of this architecture: {name} is missing")
        if tensors[name].shape != shape:
            found = list(tensors[name].shape)
            raise UserError(
                f"not a checkpoint of this architecture: {name} has shape {found}, config.json asks for {list(shape)}"
            )
        unread.discard(name)
        return tensors[name]

    d, c, f, v = config.hidden_size, config.head_dim, config.expert_width, config.vocab_size
    heads = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
    out = {"embedding.weight": take("model.embed_tokens.weight", v, d), "norm.weight": take("model.norm.weight", d)}
    if not config.tie_embeddings:
        out["head.weight"] = take("lm_head.weight", v, d)
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        out[ours + "attention_norm.weight"] = take(theirs + "input_layernorm.weight", d)
        out[ours + "ffn_norm.weight"] = take(theirs + "post_attention_layernorm.weight", d)
        out[ours + "attention.qkv_proj.weight"] = torch.cat(
            [take(f"{theirs}self_attn.{n}_proj.weight", heads[n] * c, d) for n in "qkv"]
        )
        out[ours + "attention.o_proj.weight"] = take(theirs + "self_attn.o_proj.weight", d, config.heads * c)
        for n in "qk":
            out[f"{ours}attention.{n}_norm.weight"] = take(f"{theirs}self_attn.{n}_norm.weight", c)
        out[ours + "ffn.router.weight"] = take(theirs + "mlp.gate.weight", config.experts, d)
        out[ours + "ffn.router.bias"] = torch.zeros(config.experts)
        gate_up, down = [], []
        for expert in range(config.experts):
            one = f"{theirs}mlp.experts.{expert}."
            gate_up.append(torch.cat([take(one + "gate_proj.weight", f, d), take(one + "up_proj.weight", f, d)]).T)
            down.append(take(one + "down_proj.weight", d, f).T)
        out[ours + "ffn.gate_up"] = torch.stack(gate_up).contiguous()
        out[ours + "ffn.down"] = torch.stack(down).contiguous()
    # A tied head may have been saved all the same.
    if extra := sorted(unread - {"lm_head.weight"}):
        raise UserError(f"not a checkpoint of this architecture: nothing in it reads {', '.join(extra[:5])}")
    return out
