"""Mixtral as released, and with a window, a head width of its own and a tied head."""

from transformers import MixtralConfig, MixtralForCausalLM

from family_cases.case import SHAPE, Case

_MOE = SHAPE | {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2}

CASES = [
    Case(
        "mixtral",
        MixtralConfig(**_MOE, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        MixtralForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "head_dim": None},
    ),
    Case(
        "mixtral-window",
        MixtralConfig(
            **_MOE,
            head_dim=16,
            sliding_window=6,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 500.0,
            },
        ),
        MixtralForCausalLM,
    ),
]
