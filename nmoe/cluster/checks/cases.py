"""Small models and batches for the checks: five families whose features need different care on many ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nmoe.learner.batch import Batch, token_weights
from nmoe.model.config import DeltaNet, LatentAttention, ModelConfig
from nmoe.model.transformer import Transformer

VOCABULARY = 48
EXPERTS = 24
"""As many as 2, 3, 4, 6 and 8 divide."""

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "context_tokens": 64,
    "tie_embeddings": False,
}
_MOE = _BASE | {"experts": EXPERTS, "experts_per_token": 2, "expert_width": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": _BASE | {"intermediate_size": 48, "tie_embeddings": True},
    "qwen3_moe": _MOE,
    "gpt_oss": _MOE
    | {
        "qk_norm": False,
        "qkv_bias": True,
        "output_bias": True,
        "sinks": True,
        "windows": (8, 0),
        "expert_bias": True,
        "swiglu_limit": 1.5,
        "router_linear_bias": True,
    },
    "deepseek_v3": _MOE
    | {
        "kv_heads": 4,
        "head_dim": 20,
        "latent": LatentAttention(q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, value_dim=8),
        "qk_norm": False,
        "intermediate_size": 48,
        "dense_layers": (0,),
        "experts_per_token": 3,
        "shared_experts": 2,
        "router_scores": "sigmoid",
        "router_groups": 4,
        "router_groups_kept": 2,
        "router_scale": 2.5,
    },
    "qwen3_next": _MOE
    | {
        "head_dim": 16,
        "rotary_dim": 4,
        "attention_gate": True,
        "norm_offset": True,
        "tie_embeddings": True,
        "norm_eps": 1e-2,
        "shared_experts": 1,
        "shared_gate": True,
        "recurrent_layers": (0,),
        "delta": DeltaNet(key_heads=2, value_heads=4, key_dim=12, value_dim=10, conv_tokens=4),
    },
}


def model_of(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """The same weights on every rank. In fp64 with exact numerics, by which a row's values do not depend on the rows beside it."""
    model = Transformer(ModelConfig(**(FAMILIES[family] | changes))).initialize(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.embedding.weight.mul_(25)  # as large as what the blocks add to it
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.double().set_numerics("exact") if dtype == torch.float64 else model.to(dtype)


def batch_of(lengths: tuple[int, ...], seed: int) -> Batch:
    """Random tokens, of which the last two thirds of each sequence are scored, with a return each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    inputs_T, targets_T = torch.randint(VOCABULARY, (2, tokens), generator=generator)
    scored_T = torch.cat([torch.arange(length) >= length // 3 for length in lengths])
    weights_T = token_weights("sequence", scored_T, lengths)
    returns_T = torch.randn(tokens, generator=generator)
    return Batch(lengths, inputs_T, targets_T, scored_T, weights_T, returns_T=returns_T)


def with_routes(batch: Batch, model: Transformer, seed: int) -> Batch:
    """The batch with recorded routes, which are random ones."""
    config = model.config
    shape = (batch.tokens, len(config.moe_layers), config.experts)
    order = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return replace(batch, routes_TYK=order[..., : config.experts_per_token].to(torch.int16))
