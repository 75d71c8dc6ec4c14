"""Small models whose every number matters, for the tests of the model, the learner and the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nmoe.model.config import ModelConfig
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


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Transformer]:
    """Makes a mixture of experts, or a dense model with `experts=0`, of random weights with a peaked output: under the nearly
    uniform one of a fresh model any attention and any norm would pass for any other."""

    def make(seed: int = 0, **changes: Any) -> Transformer:
        model = Transformer(ModelConfig(**(MOE | changes))).initialize(seed)
        generator = torch.Generator().manual_seed(seed)
        head = model.embedding if model.head is None else model.head
        with torch.no_grad():
            model.embedding.weight.mul_(25)  # as large as what the blocks add to it
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            for moe in model.moe_layers():
                moe.router.bias.copy_(0.1 * torch.randn(moe.router.bias.shape, generator=generator))
            ids = torch.randint(model.config.vocab_size, (32,), generator=generator)
            attend = PackedAttention([32], ids.device)
            for _ in range(100):
                states = model(ids, torch.arange(32), attend, RouterTrace())
                if head_logprobs(states, model.head_weight, ids)[1].mean() <= 0.5 * math.log(model.config.vocab_size):
                    return model
                head.weight.mul_(1.1)
        raise AssertionError("scaling the head did not make the output peaked")

    return make
