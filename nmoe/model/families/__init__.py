"""One file per checkpoint family: its configuration and weight names, mapped to nmoe's, in both directions."""

from __future__ import annotations

from typing import TypeVar

from nmoe.config.registry import Registry
from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import (
    deepseek_v3,
    gemma3_text,
    glm4_moe,
    gpt_oss,
    kimi_k2,
    llama,
    mistral,
    mixtral,
    native,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from nmoe.model.families.base import Family

# If two families have all features of a decoder, it is exported as the earlier one.
_OWN = (
    native,
    llama,
    qwen3,
    qwen3_moe,
    gpt_oss,
    deepseek_v3,
    qwen2,
    mistral,
    mixtral,
    glm4_moe,
    kimi_k2,
    gemma3_text,
    qwen3_next,
)
FAMILIES = Registry(
    "family",
    "nmoe.families",
    {family.MODEL_TYPE: f"{__name__}:{family.__name__.rpartition('.')[2]}" for family in _OWN},
)
"""Families by `model_type`. Packages offer more as entry points of the group `nmoe.families`."""

F = TypeVar("F", bound=Family)


def register_family(family: F) -> F:
    """Makes a family known by its `MODEL_TYPE`; a decorator of a class with static methods, or a call with a module.

    Example: `register_family(sys.modules[__name__])` at the end of a file made like `nmoe/model/families/llama.py`. Raises
    UserError, naming both modules, for a `MODEL_TYPE` that is taken.
    """
    FAMILIES.register(family.MODEL_TYPE, family)
    return family


# Settings of training, which no family's checkpoint has.
_OF_TRAINING = {"router_bias_rate", "router_aux_loss_coef", "expert_profile"}
# Settings without meaning in a model without experts.
_OF_EXPERTS = {
    "experts_per_token",
    "expert_width",
    "shared_experts",
    "shared_gate",
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
    families: list[Family] = [FAMILIES.get(name) for name in FAMILIES.names() if name != native.MODEL_TYPE]
    lacking = [(family, _lacks(family, config)) for family in families]
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
