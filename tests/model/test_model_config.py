"""The shape of a decoder: impossible ones are refused with the key and its value."""

import json
from dataclasses import replace
from typing import Any

import pytest

from nmoe.errors import UserError
from nmoe.model.config import LatentAttention, ModelConfig, RopeScaling

DENSE: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 8,
    "layers": 1,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 2,
    "context_tokens": 8,
    "intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "kv_heads = 3: must divide heads = 4"),
        ({"kv_heads": 0}, "kv_heads = 0: must be more than 0"),
        ({"head_dim": 3}, "head_dim = 3: must be even"),
        ({"layers": 1.0}, "layers = 1.0: expected an integer, got a number"),
        ({"vocab_size": "8"}, 'vocab_size = "8": expected an integer, got a string'),
        ({"context_tokens": None}, "context_tokens: expected an integer"),
        ({"intermediate_size": 0}, r"intermediate_size = 0: a dense model \(experts = 0\) needs the width of its FFN"),
        (
            {"experts": 4, "experts_per_token": 5, "expert_width": 4},
            "experts_per_token = 5: must be between 1 and experts = 4",
        ),
        ({"experts": 4, "expert_width": 4}, "experts_per_token: must be between 1 and experts = 4"),
        (
            {"experts": 4, "experts_per_token": 2},
            "expert_width: a mixture-of-experts model needs the width of an expert",
        ),
        ({"experts": -1}, "experts = -1: must be at least 0"),
        ({"router_scores": "relu"}, 'router_scores = "relu": must be one of "softmax", "sigmoid"'),
        ({"rope_theta": "big"}, 'rope_theta = "big": expected a number'),
        ({"qk_norm": 1}, "qk_norm = 1: expected true or false"),
        (
            {"latent": LatentAttention(q_rank=0, kv_rank=4, nope_dim=2, rope_dim=2, value_dim=2)},
            "head_dim = 2: with latent attention head_dim is nope_dim . rope_dim, and kv_heads equals heads",
        ),
        (
            {
                "latent": LatentAttention(q_rank=0, kv_rank=4, nope_dim=2, rope_dim=2, value_dim=2),
                "head_dim": 4,
                "kv_heads": 4,
            },
            "qk_norm: latent attention has neither qk_norm nor qkv_bias",
        ),
        ({"rotary_dim": 2}, "rotary_dim = 2: is a part of a head of even width, not of head_dim = 2"),
        ({"window_rope_theta": 9.0}, "window_rope_theta = 9.0: means something only beside windows"),
        ({"gelu": True, "experts": 4, "experts_per_token": 2, "expert_width": 4}, "gelu = true: experts have SiLU"),
    ],
)
def test_impossible_shapes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig(**(DENSE | changes))


def test_a_possible_shape_comes_back_whole() -> None:
    config = ModelConfig(**DENSE, experts=4, experts_per_token=4, expert_width=1, rope_theta=1)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_factors_for_each_pair_come_back_whole_and_are_as_many_as_the_pairs() -> None:
    scaling = RopeScaling("longrope", 4.0, 16, short_factors=(1.0,), long_factors=(2.5,))
    config = ModelConfig(**DENSE, rope_scaling=scaling)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(UserError, match="longrope needs 2 short and 2 long factors, one for each pair"):
        ModelConfig(**(DENSE | {"head_dim": 4}), rope_scaling=scaling)
    with pytest.raises(UserError, match=r"long_factors = \(0\.0,\) is not a list of numbers above 0"):
        ModelConfig(**DENSE, rope_scaling=replace(scaling, long_factors=(0.0,)))
