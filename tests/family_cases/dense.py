"""Dense families: Llama, Mistral, Qwen3 and Gemma 3."""

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from family_cases.case import SHAPE, Case

# Llama 3 as released (untied, stretched rotary frequencies), with biases and a head width of its own; and a small, tied one.
_LLAMA_SCALING = {
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
            rope_parameters=_LLAMA_SCALING | {"rope_theta": 500.0},
            bos_token_id=7,
            eos_token_id=[9, 11],
        ),
        LlamaForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": _LLAMA_SCALING},
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

# Mistral as first released, with one window for all layers; and with a head width of its own.
CASES += [
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

# Qwen3 as released (tied), and with what its configuration allows besides: biases, windows in some layers, YaRN.
_QWEN3_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CASES += [
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
            rope_parameters=_QWEN3_YARN | {"rope_theta": 500.0},
        ),
        Qwen3ForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": _QWEN3_YARN, "layer_types": None},
    ),
]

# Gemma 3 as released (five layers with a window to one without, frequencies of the latter stretched), tied; and untied, with
# biases, a pattern of its own and attention scaled by another width than the head's.
_GEMMA3_TEXT_LINEAR = {"rope_type": "linear", "factor": 8.0}

CASES += [
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
                "full_attention": _GEMMA3_TEXT_LINEAR | {"rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        ),
        Gemma3ForCausalLM,
        released={
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_local_base_freq": 20.0,
            "rope_scaling": _GEMMA3_TEXT_LINEAR,
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
