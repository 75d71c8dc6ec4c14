"""Small models whose every number matters, for the tests of the model, the learner and the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nmoe.model.config import DeltaNet, LatentAttention, ModelConfig, RopeScaling
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer

DENSE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "context_tokens": 64,
    "intermediate_size": 48,
    "tie_embeddings": False,
}
MOE: dict[str, Any] = DENSE | {"experts": 6, "experts_per_token": 2, "expert_width": 16, "shared_experts": 1}


# The families' features, small enough for a test. Windows and original contexts lie well below the context.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE
    | {
        "qk_norm": False,
        "tie_embeddings": True,
        "rope_theta": 500.0,
        "rope_scaling": RopeScaling("llama3", 4.0, 16, low_freq_factor=1.0, high_freq_factor=4.0),
    },
    "qwen3": DENSE | {"head_dim": 16, "tie_embeddings": True},
    "qwen3_moe": DENSE
    | {"head_dim": 16, "intermediate_size": 0, "experts": 6, "experts_per_token": 2, "expert_width": 16},
    "qwen2": DENSE | {"qk_norm": False, "qkv_bias": True, "tie_embeddings": True, "windows": (0, 8)},
    "mistral": DENSE | {"qk_norm": False, "windows": (8, 8)},
    "mixtral": DENSE
    | {"qk_norm": False, "intermediate_size": 0, "experts": 6, "experts_per_token": 2, "expert_width": 16},
    "gpt_oss": DENSE
    | {
        "layers": 4,
        "intermediate_size": 0,
        "experts": 6,
        "experts_per_token": 2,
        "expert_width": 16,
        "qk_norm": False,
        "qkv_bias": True,
        "output_bias": True,
        "sinks": True,
        "windows": (8, 0, 8, 0),
        "expert_bias": True,
        "swiglu_limit": 1.5,
        "router_linear_bias": True,
        "rope_scaling": RopeScaling("yarn", 4.0, 16, attention_factor=0.1 * math.log(4) + 1, truncate=False),
    },
    "deepseek_v3": DENSE
    | {
        "layers": 3,
        "kv_heads": 4,
        "head_dim": 20,
        "latent": LatentAttention(q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, value_dim=8),
        "qk_norm": False,
        "dense_layers": (0,),
        "experts": 8,
        "experts_per_token": 3,
        "expert_width": 16,
        "shared_experts": 2,
        "router_scores": "sigmoid",
        "router_groups": 4,
        "router_groups_kept": 2,
        "router_scale": 2.5,
        "rope_scaling": RopeScaling("yarn", 4.0, 16, beta_fast=4.0),
        "attention_scale": 20**-0.5 * (0.1 * math.log(4) + 1) ** 2,
    },
    "glm4_moe": DENSE
    | {
        "head_dim": 16,
        "rotary_dim": 8,
        "qkv_bias": True,
        "dense_layers": (0,),
        "experts": 6,
        "experts_per_token": 2,
        "expert_width": 16,
        "shared_experts": 1,
        "router_scores": "sigmoid",
    },
    "gemma3_text": DENSE
    | {
        "layers": 3,
        "head_dim": 16,
        "tie_embeddings": True,
        "windows": (8, 0, 8),
        "window_rope_theta": 20.0,
        "rope_theta": 500.0,
        "rope_scaling": RopeScaling("linear", 4.0),
        "attention_scale": 24**-0.5,
        "gelu": True,
        "output_norms": True,
        "norm_offset": True,
        "scale_embedding": True,
    },
    "qwen3_next": DENSE
    | {
        "layers": 3,
        "head_dim": 16,
        "rotary_dim": 4,
        "attention_gate": True,
        "norm_offset": True,
        "tie_embeddings": True,
        "norm_eps": 1e-2,  # norms of small reads scale up their rounding
        "intermediate_size": 0,
        "experts": 6,
        "experts_per_token": 2,
        "expert_width": 16,
        "shared_experts": 1,
        "shared_gate": True,
        "recurrent_layers": (0, 2),
        "delta": DeltaNet(key_heads=2, value_heads=4, key_dim=12, value_dim=10, conv_tokens=4),
    },
}


def peaked_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model of random weights with a peaked output: under the nearly uniform one of a fresh model any attention and any norm
    would pass for any other. Biases, sinks and what balances the router are away from zero."""
    model = Transformer(config).initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    head = model.embedding if model.head is None else model.head
    with torch.no_grad():
        model.embedding.weight.mul_(25)  # as large as what the blocks add to it
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
        for moe in model.moe_layers():
            moe.router.bias.copy_(0.1 * torch.randn(moe.router.bias.shape, generator=generator))
        ids = torch.randint(config.vocab_size, (32,), generator=generator)
        attend = PackedAttention([32], ids.device)
        for _ in range(100):
            states = model(ids, torch.arange(32), attend, RouterTrace())
            if head_logprobs(states, model.head_weight, ids)[1].mean() <= 0.5 * math.log(config.vocab_size):
                return model
            head.weight.mul_(1.1)
    raise AssertionError("scaling the head did not make the output peaked")


def tiny_family(name: str, seed: int = 0, **changes: Any) -> Transformer:
    """A peaked model with all the features of a family of checkpoints (a key of `FAMILIES`)."""
    model = peaked_model(ModelConfig(**(FAMILIES[name] | changes)), seed)
    if name not in ("deepseek_v3", "glm4_moe"):  # no other family's router has a balancing bias to keep in a checkpoint
        for moe in model.moe_layers():
            moe.router.bias.zero_()
    return model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Transformer]:
    """Makes a peaked mixture of experts, or a dense model with `experts=0`."""

    def make(seed: int = 0, **changes: Any) -> Transformer:
        return peaked_model(ModelConfig(**(MOE | changes)), seed)

    return make
