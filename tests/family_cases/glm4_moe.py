"""GLM-4.5-Air as released (half of a head turned, biases), and GLM-4.5 (head norms, other groups) with YaRN and a tied head."""

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from family_cases.case import SHAPE, Case

_MOE = SHAPE | {
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

CASES = [
    Case(
        "glm4_moe",
        Glm4MoeConfig(
            **_MOE,
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
            **(_MOE | {"first_k_dense_replace": 2, "n_shared_experts": 2}),
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
