"""How large a run's model is, counted from its shape without allocating it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nmoe.config.commands import AdaptableConfig, RunConfig
from nmoe.config.tables.model import LoraSection
from nmoe.errors import UserError
from nmoe.model.checkpoint import read_config
from nmoe.model.config import ModelConfig
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import device_and_dtype, load_tokenizer
from nmoe.runs.resolve import resolve_checkpoint, resolve_shape

# AdamW's two moments, and where weights are in low precision the master of each: bytes in fp32.
_FLOAT = 4


@dataclass(frozen=True)
class Size:
    """A model that a run trains: its shape, where and in which precision it computes, its parameters, and those of them that are
    trained, or those of its adapter. `adapts` says which."""

    shape: ModelConfig
    device: torch.device
    dtype: torch.dtype
    parameters: int
    trained: int
    adapts: bool

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.dtype.itemsize + (self.trained * self.dtype.itemsize if self.adapts else 0)

    @property
    def gradients(self) -> int:
        """Bytes of gradients, which are in fp32 as the weights that are stepped."""
        return self.trained * _FLOAT

    @property
    def optimizer(self) -> int:
        """Bytes of AdamW's state."""
        return self.trained * _FLOAT * (2 if self.dtype == torch.float32 else 3)

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint: what is trained, and its optimizer."""
        return self.trained * self.dtype.itemsize + self.optimizer


def size_of(config: RunConfig) -> Size:
    """Raises UserError where a checkpoint or tokenizer is missing, or the machine lacks the device."""
    settings = config.model
    device, dtype = device_and_dtype(settings)
    if settings.shape is not None:
        vocabulary = load_tokenizer(settings).vocab_size
        shape = ModelConfig(vocab_size=vocabulary, **settings.shape.model_dump())
    else:
        assert settings.path is not None, "the configuration asks for a path where there is no shape"
        shape = shape_of(settings.path)
    with torch.device("meta"):
        model = Transformer(shape)
    parameters = count(model)
    section = config.lora if isinstance(config, AdaptableConfig) else None
    trained = parameters if section is None else _adapter(model, section)
    return Size(shape, device, dtype, parameters, trained, section is not None)


def shape_of(checkpoint: str) -> ModelConfig:
    """The shape of a checkpoint's model, of which no weights are fetched. Raises UserError."""
    return read_config(resolve_shape(Path(checkpoint)))[1]


def parameters_of(checkpoint: str) -> int:
    """The parameters of a checkpoint's model. Raises UserError."""
    with torch.device("meta"):
        return count(Transformer(shape_of(checkpoint)))


def count(model: Transformer) -> int:
    """All parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _adapter(model: Transformer, section: LoraSection) -> int:
    if section.path is not None:
        path = resolve_checkpoint(Path(section.path)) / "adapter_model.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                return sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: torn or not a safetensors file: {error}") from error
    with torch.device("meta"):
        lora = Lora(model, LoraSettings(section.rank, 1.0, section.rslora), choose(model, section.targets), "", "")
    return sum(parameter.numel() for parameter in lora.parameters())
