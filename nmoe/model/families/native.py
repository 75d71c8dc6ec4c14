"""nmoe's own checkpoint layout, used for the checkpoints of runs: names and settings are the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nmoe.model.config import ModelConfig
from nmoe.model.families.base import Entry, Packing
from nmoe.model.transformer import Transformer

MODEL_TYPE = "nmoe"
PACKINGS: tuple[Packing, ...] = ()


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict({key: value for key, value in raw.items() if key != "model_type"})


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {"model_type": MODEL_TYPE, **config.to_dict()}


def entries(config: ModelConfig) -> Iterator[Entry]:
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    for name, tensor in state.items():
        yield Entry(name, name, tuple(tensor.shape))


def ignores(name: str, config: ModelConfig) -> bool:
    return False
