"""The shape of a decoder: impossible ones are refused with the key and its value."""

import json
from typing import Any

import pytest

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig

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
        ({"kv_heads": 3}, "heads = 4 is not a multiple of kv_heads = 3"),
        ({"kv_heads": 0}, "kv_heads = 0 is not a whole number from 1 up"),
        ({"head_dim": 3}, "3 dimensions are odd"),
        ({"layers": 1.0}, "layers = 1.0 is not a whole number"),
        ({"vocab_size": "8"}, "vocab_size = '8' is not a whole number"),
        ({"context_tokens": None}, "context_tokens = None"),
        ({"intermediate_size": 0}, "intermediate_size must be positive where"),
        (
            {"experts": 4, "experts_per_token": 5, "expert_width": 4},
            r"experts_per_token = 5 must lie in 1..experts = 4",
        ),
        ({"experts": 4, "expert_width": 4}, r"experts_per_token = 0 must lie in 1..experts = 4"),
        ({"experts": 4, "experts_per_token": 2}, "expert_width must be positive"),
        ({"experts": -1}, "experts = -1 is not a whole number from 0 up"),
        ({"router_scores": "relu"}, "router_scores = 'relu' is neither softmax nor sigmoid"),
        ({"rope_theta": "big"}, "rope_theta = 'big' is not a number"),
        ({"qk_norm": 1}, "qk_norm = 1 is neither true nor false"),
    ],
)
def test_impossible_shapes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig(**(DENSE | changes))


def test_a_possible_shape_comes_back_whole() -> None:
    config = ModelConfig(**DENSE, experts=4, experts_per_token=4, expert_width=1, rope_theta=1)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
