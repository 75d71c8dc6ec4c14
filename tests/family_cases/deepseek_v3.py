"""DeepSeek-V3 as released, Moonlight (no latent for queries, one group of experts), and YaRN without its sharpening."""

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from family_cases.case import SHAPE, Case

_MOE = SHAPE | {
    # Far from what the latents are normed with.
    "rms_norm_eps": 1e-2,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_YARN = {
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 16,
}
_RELEASED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "ep_size": 1,
    "aux_loss_alpha": 1e-3,
}

CASES = [
    Case(
        "deepseek_v3",
        DeepseekV3Config(
            **_MOE,
            q_lora_rank=24,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_parameters=_YARN | {"rope_type": "yarn", "rope_theta": 500.0},
        ),
        DeepseekV3ForCausalLM,
        released=_RELEASED
        | {
            "rope_parameters": None,
            "rope_interleave": None,
            "head_dim": None,
            "qk_head_dim": None,
            "rope_theta": 500.0,
            "rope_scaling": _YARN | {"type": "yarn"},
            "num_nextn_predict_layers": 1,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
        },
    ),
    Case(
        "moonlight",
        DeepseekV3Config(
            **(_MOE | {"first_k_dense_replace": 2}),
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.446,
            norm_topk_prob=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        DeepseekV3ForCausalLM,
        released=_RELEASED | {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": None},
    ),
    Case(
        "deepseek_v3-plain-yarn",
        DeepseekV3Config(
            **(_MOE | {"first_k_dense_replace": 0}),
            q_lora_rank=24,
            n_group=2,
            topk_group=1,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.3,
            },
        ),
        DeepseekV3ForCausalLM,
    ),
]
