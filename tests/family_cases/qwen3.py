"""Qwen3 as released (tied), and with what its configuration allows besides: biases, windows in some layers, YaRN."""

from transformers import Qwen3Config, Qwen3ForCausalLM

from family_cases.case import SHAPE, Case

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CASES = [
    Case(
        "qwen3",
        Qwen3Config(
            **SHAPE,
            intermediate_size=40,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        Qwen3ForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": None, "layer_types": None},
    ),
    Case(
        "qwen3-windows",
        Qwen3Config(
            **SHAPE,
            intermediate_size=40,
            num_key_value_heads=2,
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=1,
            rope_parameters=_YARN | {"rope_theta": 500.0},
        ),
        Qwen3ForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": _YARN, "layer_types": None},
    ),
]
