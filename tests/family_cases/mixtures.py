"""Mixtures of experts: Mixtral, GLM-4.5 and Qwen3-Next."""

from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from family_cases.case import SHAPE, Case

# Mixtral as released, and with a window, a head width of its own and a tied head.
_MIXTRAL_MOE = SHAPE | {
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}

CASES = [
    Case(
        "mixtral",
        MixtralConfig(**_MIXTRAL_MOE, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        MixtralForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "head_dim": None},
    ),
    Case(
        "mixtral-window",
        MixtralConfig(
            **_MIXTRAL_MOE,
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

# GLM-4.5-Air as released (half of a head turned, biases), and GLM-4.5 (head norms, other groups) with YaRN and a tied head.
_GLM4_MOE_MOE = SHAPE | {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}

CASES += [
    Case(
        "glm4_moe",
        Glm4MoeConfig(
            **_GLM4_MOE_MOE,
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            bos_token_id=7,
            eos_token_id=[9, 11],
        ),
        Glm4MoeForCausalLM,
        released={
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": None,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
        },
    ),
    Case(
        "glm4_moe-head-norms",
        Glm4MoeConfig(
            **(_GLM4_MOE_MOE | {"first_k_dense_replace": 2, "n_shared_experts": 2}),
            use_qk_norm=True,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
            },
        ),
        Glm4MoeForCausalLM,
    ),
]

# Qwen3-Next as released (three layers with a state to one with attention, a quarter of a head turned), with fewer key heads than
# value heads; and with biases, dense layers, a tied head, YaRN, a wider shared expert and a layer order of its own.
_QWEN3_NEXT_MOE = SHAPE | {
    # The norm of what a memory gives scales it up, and its rounding: with 1e-5 both sides are some 1e-4 from fp64.
    "rms_norm_eps": 1e-3,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
}

CASES += [
    Case(
        "qwen3_next",
        Qwen3NextConfig(
            **(_QWEN3_NEXT_MOE | {"num_hidden_layers": 4}),
            shared_expert_intermediate_size=24,
            linear_num_value_heads=4,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
            bos_token_id=7,
            eos_token_id=[9, 11],
        ),
        Qwen3NextForCausalLM,
        released={
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": None,
            "partial_rotary_factor": 0.25,
            "layer_types": None,
            "full_attention_interval": 4,
        },
    ),
    Case(
        "qwen3_next-dense-layer",
        Qwen3NextConfig(
            **_QWEN3_NEXT_MOE,
            shared_expert_intermediate_size=48,
            linear_num_value_heads=2,
            linear_conv_kernel_dim=3,
            attention_bias=True,
            norm_topk_prob=False,
            mlp_only_layers=[1],
            layer_types=["full_attention", "linear_attention", "full_attention"],
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        Qwen3NextForCausalLM,
    ),
]
