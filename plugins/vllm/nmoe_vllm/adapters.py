"""Adds an adapter in PEFT's format to the base weights that a server was started with."""

# Shapes: D inputs, F outputs, E experts, r rank.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def merged(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the base's tensors, those that the adapter changes as `W + scale * B @ A`, summed in fp32.

    `config` is the content of `adapter_config.json`. The experts' two weights are one module's parameters there, wrapped one in the
    other: `experts.base_layer` is the update of `gate_up_proj` where both have one. Raises ValueError for another kind of adapter,
    and for one that does not fit the base.
    """
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        raise ValueError("adapter refused: it is not a plain LoRA")
    if not adapter:
        raise ValueError("adapter refused: it has no tensors")
    total = dict(base)
    for name, a in adapter.items():
        if name.endswith(_B) and name.removesuffix(_B) + _A in adapter:
            continue
        if not name.startswith(_PREFIX) or not name.endswith(_A) or name.removesuffix(_A) + _B not in adapter:
            raise ValueError(f"adapter refused: {name} has no counterpart of the name {_PREFIX}MODULE{_A} or {_B}")
        module, b = name.removeprefix(_PREFIX).removesuffix(_A), adapter[name.removesuffix(_A) + _B]
        for theirs, update in _updates(module, a.float(), b.float(), config, base):
            if theirs not in base or base[theirs].shape != update.shape:
                raise ValueError(f"adapter refused: {name} is of an update of shape {list(update.shape)} for {theirs}")
            total[theirs] = (base[theirs].float() + update).to(base[theirs].dtype)
    return total


def _updates(
    module: str, a: Tensor, b: Tensor, config: Mapping[str, Any], base: Mapping[str, Tensor]
) -> list[tuple[str, Tensor]]:
    experts = module.removesuffix(".base_layer")
    if not experts.endswith(".experts"):
        return [(f"{module}.weight", _scale(module, len(a), config) * (b @ a))]
    below = (name.removeprefix(f"{experts}.").split(".")[0] for name in base if name.startswith(f"{experts}."))
    count = len({number for number in below if number.isdigit()})
    if not count:
        raise ValueError(f"adapter refused: the base has no weights of the name {experts}.0.gate_proj.weight")
    down = module == experts and any(name.endswith("down_proj") for name in config.get("target_parameters") or [])
    rank = len(a) // count
    scale = _scale(f"{experts}.{'down_proj' if down else 'gate_up_proj'}", rank, config)
    update_EFD = scale * torch.einsum("fre,erd->efd", b.unflatten(1, (rank, count)), a.unflatten(0, (count, rank)))
    parts = (
        {"down_proj": update_EFD} if down else dict(zip(("gate_proj", "up_proj"), update_EFD.chunk(2, 1), strict=True))
    )
    return [(f"{experts}.{e}.{part}.weight", update[e]) for part, update in parts.items() for e in range(count)]


def _scale(name: str, rank: int, config: Mapping[str, Any]) -> float:
    patterns = config.get("alpha_pattern") or {}
    matching = (alpha for key, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", name))
    alpha = next(matching, config["lora_alpha"])
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
