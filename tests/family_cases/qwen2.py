"""Qwen2.5 as released (biases that no setting names), tied; and with windows in some layers and YaRN."""

from transformers import Qwen2Config, Qwen2ForCausalLM

from family_cases.case import SHAPE, Case

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CASES = [
    Case(
        "qwen2",
        Qwen2Config(
            **SHAPE,
            intermediate_size=40,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            bos_token_id=7,
            eos_token_id=[9, 11],
        ),
        Qwen2ForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "layer_types": None, "sliding_window": 32768},
    ),
    Case(
        "qwen2-windows",
        Qwen2Config(
            **SHAPE,
            intermediate_size=40,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=1,
            rope_parameters=_YARN | {"rope_theta": 500.0},
        ),
        Qwen2ForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": _YARN, "layer_types": None},
    ),
]
