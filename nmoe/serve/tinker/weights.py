"""The weights that clients train and sample from: an adapter of the base, or another whole model."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_weights, read_config
from nmoe.model.config import Numerics
from nmoe.model.families import native
from nmoe.model.lora import ATTENTION, EXPERTS, MLP, Lora, LoraSettings, choose, refuse_high_rank, sites
from nmoe.model.peft_format import is_adapter, read_settings, resume_adapter, save_adapter
from nmoe.model.transformer import Transformer
from nmoe.serve.tinker.errors import TinkerError

# The scale of an update is ALPHA / rank, as in the adapters that Tinker's service hands out.
_ALPHA = 32.0

Weights = Lora | Transformer
"""An adapter, detached from the base, or a model of the base's shape."""


@dataclass(frozen=True)
class Base:
    """The checkpoint that all models share."""

    model: Transformer
    name: str
    directory: Path
    fingerprint: str

    @property
    def numerics(self) -> Numerics:
        return "exact" if self.model.exact else "fast"

    @property
    def numbers(self) -> str:
        """What the numbers of a model depend on beside its checkpoint: precision, device and numerics."""
        weight = self.model.head_weight
        return f"{str(weight.dtype).removeprefix('torch.')}, --device {weight.device.type} --numerics {self.numerics}"


@dataclass(frozen=True)
class Shape:
    """The adapter that a client asks for; of rank 0 the whole model."""

    rank: int
    attention: bool = True
    mlp: bool = True
    seed: int = 0

    @property
    def whole(self) -> bool:
        return self.rank == 0

    @property
    def about(self) -> dict[str, bool | int]:
        """What the protocol says of it. SDKs before 0.38 make another model of that rank before they load its weights."""
        return {"is_lora": not self.whole, "lora_rank": self.rank}

    def settings(self, model: Transformer) -> LoraSettings:
        """Raises TinkerError for an adapter that changes nothing."""
        names = {site.target for site in sites(model)}
        wanted = {*(ATTENTION if self.attention else ()), *((*MLP, *EXPERTS) if self.mlp else ())}
        if not names & wanted:
            raise TinkerError("lora_config: train_attn and train_mlp are both false, so that there is nothing to train")
        return LoraSettings(self.rank, _ALPHA, targets=tuple(sorted(names & wanted)))


def new_weights(base: Base, shape: Shape) -> Weights:
    """Returns an adapter of this shape, which is not set yet, or a copy of the base. Raises TinkerError or UserError for an adapter
    that the base cannot have. Like all that attaches an adapter it runs on the engine's thread."""
    if shape.whole:
        return copy.deepcopy(base.model)
    settings = shape.settings(base.model)
    chosen = choose(base.model, settings.targets)
    refuse_high_rank(base.model, chosen, settings.rank)
    lora = Lora(base.model, settings, chosen, str(base.directory), base.fingerprint)
    lora.detach()
    return lora


def attached(weights: Weights) -> AbstractContextManager[Transformer]:
    """Returns a context in which there is a model of these weights."""
    return weights.attached() if isinstance(weights, Lora) else nullcontext(weights)


def tensors_of(weights: Weights) -> list[Tensor]:
    """Returns the tensors that make them, always in the same order; training changes them in place."""
    found = weights.parameters() if isinstance(weights, Lora) else weights.state_dict().values()
    return [tensor.detach() for tensor in found]


def read_into(weights: Weights, directory: Path) -> None:
    """Reads saved weights. Raises UserError for damaged ones, and for another shape; an adapter's base has to be this one."""
    whole = not isinstance(weights, Lora)
    if shape_of(directory).whole != whole:
        there, here = ("an adapter", "the whole model") if whole else ("a whole model", "an adapter")
        raise UserError(f"{directory}: of another shape: {there}, and {here} is trained")
    if isinstance(weights, Lora):
        resume_adapter(weights, directory)
    else:
        load_weights(weights, directory)


def read_values(base: Base, directory: Path) -> tuple[Shape, list[Tensor]]:
    """Reads saved weights: their shape and their tensors. Raises UserError as `read_into` does."""
    shape = shape_of(directory)
    weights = new_weights(base, shape)
    read_into(weights, directory)
    return shape, tensors_of(weights)


def save_for_sampling(base: Base, weights: Weights, directory: Path) -> None:
    """Writes an adapter as PEFT loads it, or a model as transformers does, into an existing directory."""
    if isinstance(weights, Lora):
        save_adapter(weights, directory)
    else:
        export_model(weights, directory, own_format=read_config(base.directory)[0] is native)


def shape_of(directory: Path) -> Shape:
    """Returns the shape of saved weights. Raises UserError for a directory that has none."""
    if not is_adapter(directory) and (directory / "config.json").exists():
        return Shape(0)
    settings, _, raw = read_settings(directory)
    targets = {str(one).rpartition(".")[2] for one in raw.get("target_modules") or ()}
    mlp = bool(targets & set(MLP)) or bool(raw.get("target_parameters"))
    return Shape(settings.rank, bool(targets & set(ATTENTION)), mlp)
