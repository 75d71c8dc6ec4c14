"""Mistral as first released, with one window for all layers; and with a head width of its own."""

from transformers import MistralConfig, MistralForCausalLM

from family_cases.case import SHAPE, Case

CASES = [
    Case(
        "mistral",
        MistralConfig(
            **SHAPE,
            intermediate_size=40,
            num_key_value_heads=2,
            sliding_window=6,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        MistralForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "head_dim": None},
    ),
    Case(
        "mistral-wide-heads",
        MistralConfig(
            **SHAPE,
            intermediate_size=40,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=20,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        ),
        MistralForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
]
