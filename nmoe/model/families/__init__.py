"""One file per checkpoint family: its configuration and weight names, mapped to nmoe's, in both directions."""

from __future__ import annotations

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import deepseek_v3, gpt_oss, llama, mistral, mixtral, native, qwen2, qwen3, qwen3_moe
from nmoe.model.families.base import Family

HF_FAMILIES: tuple[Family, ...] = (llama, qwen3, qwen3_moe, gpt_oss, deepseek_v3, qwen2, mistral, mixtral)
FAMILIES: dict[str, Family] = {family.MODEL_TYPE: family for family in (native, *HF_FAMILIES)}

# Settings of training, which no family's checkpoint has.
_OF_TRAINING = {"router_bias_rate", "router_aux_loss_coef"}
# Settings without meaning in a model without experts.
_OF_EXPERTS = {
    "experts_per_token",
    "expert_width",
    "shared_experts",
    "expert_bias",
    "swiglu_limit",
    "router_scores",
    "renormalize",
    "router_linear_bias",
    "router_groups",
    "router_groups_kept",
    "router_scale",
}


def family_of(config: ModelConfig) -> Family:
    """The Hugging Face family that has every feature of this decoder. Raises UserError with what the nearest one lacks."""
    lacking = [(family, _lacks(family, config)) for family in HF_FAMILIES]
    family, lacks = min(lacking, key=lambda pair: len(pair[1]))
    if lacks:
        raise UserError(
            f"no Hugging Face family that nmoe knows has this model's features; {family.MODEL_TYPE}, the nearest, lacks "
            + ", ".join(f"{name} = {value!r}" for name, value in lacks.items())
        )
    return family


def differences(ours: ModelConfig, theirs: ModelConfig) -> dict[str, object]:
    """The settings of ours, with their values, that differ in theirs; settings that do not change the model are left out."""
    others = theirs.to_dict()
    silent = _OF_TRAINING if ours.experts else _OF_TRAINING | _OF_EXPERTS
    if ours.experts and not ours.dense_layers:
        silent = silent | {"intermediate_size"}
    return {name: value for name, value in ours.to_dict().items() if others[name] != value and name not in silent}


def _lacks(family: Family, config: ModelConfig) -> dict[str, object]:
    """The settings, with their values, that are lost when written as this family's."""
    try:
        return differences(config, family.config_from_hf(family.config_to_hf(config)))
    except UserError:  # such as experts = 0 in a family of mixtures
        return config.to_dict()
