"""Llama 3 as released (untied, stretched rotary frequencies), with biases and a head width of its own; and a small, tied one."""

from transformers import LlamaConfig, LlamaForCausalLM

from family_cases.case import SHAPE, Case

_SCALING = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}

CASES = [
    Case(
        "llama3",
        LlamaConfig(
            **SHAPE,
            intermediate_size=40,
            num_key_value_heads=2,
            head_dim=16,
            attention_bias=True,
            rope_parameters=_SCALING | {"rope_theta": 500.0},
            bos_token_id=7,
            eos_token_id=[9, 11],
        ),
        LlamaForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": _SCALING},
    ),
    Case(
        "llama-tied",
        LlamaConfig(**SHAPE, intermediate_size=40, tie_word_embeddings=True),
        LlamaForCausalLM,
        released={"rope_parameters": None, "head_dim": None, "num_key_value_heads": None, "rope_scaling": None},
    ),
    Case(
        "llama-linear",
        LlamaConfig(
            **SHAPE,
            intermediate_size=40,
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        ),
        LlamaForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
]
