"""One module per family of Hugging Face checkpoints: maps configuration and weight names to nmoe's, in both directions."""

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
"""The registry of families by `model_type`. Packages add families as entry points of the group `nmoe.families`."""

F = TypeVar("F", bound=Family)


def register_family(family: F) -> F:
    """Makes a family available by its `MODEL_TYPE`. Use it as decorator of a class with static methods, or call it with a module.

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
    """Returns the Hugging Face family that has every feature of this configuration. Raises UserError that says what the nearest
    family lacks."""
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
    """Returns the settings of `ours`, with their values, that differ in `theirs`. Settings that do not change the model are left
    out."""
    others = theirs.to_dict()
    silent = _OF_TRAINING if ours.experts else _OF_TRAINING | _OF_EXPERTS
    if ours.experts and not ours.dense_layers:
        silent = silent | {"intermediate_size"}
    return {name: value for name, value in ours.to_dict().items() if others[name] != value and name not in silent}


def _lacks(family: Family, config: ModelConfig) -> dict[str, object]:
    """Returns the settings, with their values, that get lost when the configuration is written as this family's `config.json`; all
    settings if the family cannot read the result at all."""
    try:
        return differences(config, family.config_from_hf(family.config_to_hf(config)))
    except UserError:  # such as experts = 0 in a family of mixtures
        return config.to_dict()
