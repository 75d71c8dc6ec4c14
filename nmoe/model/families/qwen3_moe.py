"""Qwen3-MoE: softmax router, QK-norm, SwiGLU experts saved one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig

MODEL_TYPE = "qwen3_moe"


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """The decoder that a Qwen3-MoE `config.json` describes. Raises UserError for features the family has but nmoe lacks."""
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            "qwen3_moe: mlp_only_layers and decoder_sparse_step other than 1 (dense layers among MoE layers) are not supported"
        )
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10_000.0)}
    if rope.get("rope_type", "default") != "default" or raw.get("rope_scaling"):
        raise UserError(f"qwen3_moe: rope type {rope.get('rope_type')!r} is not supported")
    if raw.get("attention_bias") or raw.get("use_sliding_window"):
        raise UserError("qwen3_moe: attention_bias and use_sliding_window are not supported")
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        context_tokens=raw["max_position_embeddings"],
        # transformers 5 writes num_local_experts, the released checkpoints num_experts.
        experts=raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        renormalize=raw.get("norm_topk_prob", False),
        qk_norm=True,
        tie_embeddings=raw.get("tie_word_embeddings", False),
        rope_theta=rope["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
    )


def weights_from_hf(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """nmoe's state dict from the family's saved tensors; raises UserError naming a tensor that is missing."""

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise UserError(f"qwen3_moe checkpoint: tensor {name} is missing")
        return tensors[name]

    out = {"embedding.weight": take("model.embed_tokens.weight"), "norm.weight": take("model.norm.weight")}
    if not config.tie_embeddings:
        out["head.weight"] = take("lm_head.weight")
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        out[ours + "attention_norm.weight"] = take(theirs + "input_layernorm.weight")
        out[ours + "ffn_norm.weight"] = take(theirs + "post_attention_layernorm.weight")
        out[ours + "attention.qkv_proj.weight"] = torch.cat([take(f"{theirs}self_attn.{n}_proj.weight") for n in "qkv"])
        out[ours + "attention.o_proj.weight"] = take(theirs + "self_attn.o_proj.weight")
        for n in "qk":
            out[f"{ours}attention.{n}_norm.weight"] = take(f"{theirs}self_attn.{n}_norm.weight")
        out[ours + "ffn.router.weight"] = take(theirs + "mlp.gate.weight")
        out[ours + "ffn.router.bias"] = torch.zeros(config.experts)
        gate_up, down = [], []
        for expert in range(config.experts):
            one = f"{theirs}mlp.experts.{expert}."
            gate_up.append(torch.cat([take(one + "gate_proj.weight"), take(one + "up_proj.weight")]).T)
            down.append(take(one + "down_proj.weight").T)
        out[ours + "ffn.gate_up"] = torch.stack(gate_up).contiguous()
        out[ours + "ffn.down"] = torch.stack(down).contiguous()
    return out
