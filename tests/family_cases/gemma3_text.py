"""Gemma 3 as released (five layers with a window to one without, frequencies of the latter stretched), tied; and untied, with
biases, a pattern of its own and attention scaled by another width than the head's."""

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from family_cases.case import SHAPE, Case

_LINEAR = {"rope_type": "linear", "factor": 8.0}

CASES = [
    Case(
        "gemma3_text",
        Gemma3TextConfig(
            **(SHAPE | {"num_hidden_layers": 6}),
            intermediate_size=40,
            pad_token_id=None,  # or transformers leaves its row of the embedding without a gradient
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=6,
            query_pre_attn_scalar=16,
            rope_parameters={
                "full_attention": _LINEAR | {"rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        ),
        Gemma3ForCausalLM,
        released={
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_local_base_freq": 20.0,
            "rope_scaling": _LINEAR,
            "layer_types": None,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": None,
            "cache_implementation": "hybrid",
        },
    ),
    Case(
        "gemma3_text-untied",
        Gemma3TextConfig(
            **SHAPE,
            intermediate_size=40,
            pad_token_id=None,  # or transformers leaves its row of the embedding without a gradient
            num_key_value_heads=2,
            head_dim=16,
            attention_bias=True,
            sliding_window=9,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            query_pre_attn_scalar=24,
            tie_word_embeddings=False,
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "rope_theta": 500.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        ),
        Gemma3ForCausalLM,
    ),
]
