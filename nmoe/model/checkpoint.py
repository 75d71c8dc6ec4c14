"""Model checkpoints: `config.json` and `model.safetensors`, in nmoe's own layout or that of a known Hugging Face family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import qwen3_moe
from nmoe.model.transformer import Transformer

MODEL_TYPE = "nmoe"
_FAMILIES = {qwen3_moe.MODEL_TYPE: qwen3_moe}


def save_model(model: Transformer, directory: Path) -> None:
    """Writes the weights, balancing biases included, and the configuration into an existing directory."""
    config = {"model_type": MODEL_TYPE, **model.config.to_dict()}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}, directory / "model.safetensors"
    )


def load_model(directory: Path) -> Transformer:
    """The model a checkpoint directory holds.

    Raises UserError for a missing or torn file, an architecture this package does not know, and weights that do not fit
    the configuration.
    """
    config = _config(_read_config(directory), directory / "config.json")
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to_empty(device="cpu")
    model.reset_tables()
    load_weights(model, directory)
    return model


def load_weights(model: Transformer, directory: Path) -> None:
    """Copies a checkpoint's weights into a model of the same configuration."""
    model_type = _read_config(directory).get("model_type")
    tensors = _read_tensors(directory / "model.safetensors")
    if model_type in _FAMILIES:
        try:
            tensors = _FAMILIES[model_type].weights_from_hf(tensors, model.config)
        except UserError as error:
            raise UserError(f"{directory / 'model.safetensors'}: {error}") from None
    wanted = model.state_dict()
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} is not part of this architecture" for name in tensors if name not in wanted]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, this architecture wants {list(t.shape)}"
        for name, t in wanted.items()
        if name in tensors and tensors[name].shape != t.shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise UserError(f"{directory / 'model.safetensors'}: not a checkpoint of this architecture: {shown}")
    model.load_state_dict(tensors)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; a checkpoint is a directory with config.json and model.safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can not be read as a model configuration: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a model configuration is a JSON object")
    return raw


def _config(raw: dict[str, Any], path: Path) -> ModelConfig:
    model_type = raw.pop("model_type", None)
    if model_type != MODEL_TYPE and model_type not in _FAMILIES:
        known = ", ".join(sorted([MODEL_TYPE, *_FAMILIES]))
        raise UserError(f"{path}: model_type = {model_type!r} is not an architecture nmoe knows ({known})")
    try:
        return ModelConfig.from_dict(raw) if model_type == MODEL_TYPE else _FAMILIES[model_type].config_from_hf(raw)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: torn or not a safetensors file: {error}") from None
