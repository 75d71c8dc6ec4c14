"""A run's model in small: the same architecture with about a thousandth of the weights, drawn at random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nmoe.config.commands import RLConfig
from nmoe.errors import UserError
from nmoe.model.checkpoint import new_model, save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.plan.estimate import count, shape_of
from nmoe.recipes.setup import load_tokenizer
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

_PART = 1000
_WIDTHS = (256, 128, 64, 32, 16)
_LAYERS, _HEADS, _EXPERTS = 4, 4, 8


def shape_in_full(config: RLConfig) -> ModelConfig:
    """Returns the architecture of the run's model, whose weights may be elsewhere. Raises UserError if it is not known."""
    if config.model.path is not None:
        return shape_of(config.model.path)
    assert config.model.shape is not None, "the configuration asks for a path or a shape"
    return ModelConfig(vocab_size=tokenizer_or_bytes(config)[0].vocab_size, **config.model.shape.model_dump())


def tokenizer_or_bytes(config: RLConfig) -> tuple[Tokenizer, str | None]:
    """Returns the run's tokenizer, or one of bytes with the reason why the run's is not there."""
    try:
        return load_tokenizer(config.model), None
    except UserError as error:
        return Tokenizer.train((), SMALLEST_VOCABULARY), str(error)


def small_shape(full: ModelConfig, vocabulary: int) -> ModelConfig:
    """Returns the widest architecture with all features of the full one that has at most a thousandth of its weights, or the
    narrowest."""
    with torch.device("meta"):
        most = count(Transformer(full)) / _PART
        for width in _WIDTHS:
            shape = _of_width(full, width, vocabulary)
            if count(Transformer(shape)) <= most:
                break
    return shape


def _of_width(full: ModelConfig, width: int, vocabulary: int) -> ModelConfig:
    """Keeps the context and the sizes of heads, by which rotary embeddings turn, and narrows everything else."""
    layers, kv_heads = min(full.layers, _LAYERS), 1
    heads = min(full.heads // full.kv_heads, _HEADS)
    changed: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads if full.latent is not None else kv_heads,
        "intermediate_size": min(full.intermediate_size, 2 * width),
        "experts": min(full.experts, _EXPERTS),
        "experts_per_token": min(full.experts_per_token, 2),
        "expert_width": min(full.expert_width, width),
        "shared_experts": min(full.shared_experts, 1),
        "router_groups": 1,
        "router_groups_kept": 1,
        "windows": full.windows[:layers],
        "dense_layers": tuple(layer for layer in full.dense_layers if layer < layers - 1),
        "recurrent_layers": tuple(layer for layer in full.recurrent_layers if layer < layers),
    }
    if not any(changed["windows"]):
        changed["window_rope_theta"] = 0.0
    if full.latent is not None:
        changed["latent"] = replace(
            full.latent, q_rank=min(full.latent.q_rank, width), kv_rank=min(full.latent.kv_rank, width)
        )
    if full.delta is not None:
        changed["delta"] = replace(full.delta, key_heads=1, value_heads=full.delta.value_heads // full.delta.key_heads)
    return ModelConfig(**{name: getattr(full, name) for name in type(full).model_fields} | changed)


def write_small(config: RLConfig, directory: Path) -> tuple[ModelConfig, str | None]:
    """Writes a model in small with its tokenizer into a new directory. Returns its architecture, and the reason if the tokenizer is
    another than the run's. Raises UserError if the run's architecture is not known."""
    tokenizer, missing = tokenizer_or_bytes(config)
    full = shape_in_full(config)
    shape = small_shape(full, full.vocab_size if missing is None else tokenizer.vocab_size)
    directory.mkdir(parents=True)
    save_model(new_model(shape, torch.float32, "cpu").initialize(config.run.seed), directory)
    tokenizer.save(directory)
    return shape, missing
