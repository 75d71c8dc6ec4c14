"""Qwen3-MoE as released, and with dense layers, biases, a window, YaRN and weights that are not renormalised."""

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from family_cases.case import SHAPE, Case

_MOE = SHAPE | {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CASES = [
    Case(
        "qwen3_moe",
        Qwen3MoeConfig(**_MOE, norm_topk_prob=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        Qwen3MoeForCausalLM,
        released={
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": None,
            "num_local_experts": None,
            "num_experts": 6,
        },
    ),
    Case(
        "qwen3_moe-dense-layers",
        Qwen3MoeConfig(
            **(_MOE | {"num_hidden_layers": 4}),
            mlp_only_layers=[1],
            decoder_sparse_step=2,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=6,
            rope_parameters=_YARN | {"rope_theta": 500.0},
        ),
        Qwen3MoeForCausalLM,
        released={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": _YARN},
    ),
]
