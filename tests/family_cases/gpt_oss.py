"""gpt-oss as released, and without windows, biases of attention or stretched positions, with a tied head."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from family_cases.case import SHAPE, Case

_MOE = SHAPE | {
    "intermediate_size": 16,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    # Low enough to clamp: gates and ups here are about one.
    "swiglu_limit": 1.2,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}

CASES = [
    Case(
        "gpt_oss",
        GptOssConfig(
            **(_MOE | {"num_hidden_layers": 4}),
            sliding_window=8,
            rope_parameters=_YARN | {"rope_theta": 500.0},
            bos_token_id=3,
            eos_token_id=[9, 11],
        ),
        GptOssForCausalLM,
        released={
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": _YARN,
            "swiglu_alpha": None,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        },
    ),
    Case(
        "gpt_oss-plain",
        GptOssConfig(
            **_MOE,
            layer_types=["full_attention"] * 3,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        GptOssForCausalLM,
    ),
    Case(
        "gpt_oss-uneven-windows",
        GptOssConfig(
            **_MOE,
            sliding_window=1,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
            rope_parameters=_YARN | {"rope_theta": 500.0, "truncate": True, "attention_factor": 1.5},
        ),
        GptOssForCausalLM,
    ),
]


def to_mxfp4(directory: Path) -> dict[str, Tensor]:
    """Puts the experts of a checkpoint into MXFP4, as random bytes and scales of about their size; returns all tensors stored."""
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(raw))
    return tensors
