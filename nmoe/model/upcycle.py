"""Sparse upcycling: turns a dense checkpoint into a mixture of experts (Komatsuzaki et al. 2023, arXiv:2212.05055, section 2.1).

Every feed-forward block becomes `experts` copies of it and a new router; the weights of a token's chosen experts sum to 1. The
mixture computes the same as the dense model: in bf16 to the bit, since a sum of weights that is 1 up to fp32's rounding is too near
to 1 to change an output of 8 bits; in fp32 up to that rounding.
"""

# Shapes: D width, F hidden units, E experts.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.generation import read_generation
from nmoe.model.checkpoint import read_config, stored_dtype, write_checkpoint
from nmoe.model.config import ModelConfig
from nmoe.model.families import family_of, native
from nmoe.model.families.base import Family, reader
from nmoe.model.shards import open_tensors
from nmoe.model.transformer import Transformer

# The standard deviation of the router's weights, as in the paper's code and in transformers.
_ROUTER_STD = 0.02

# One shard is in memory at a time. Large models are not cut into more shards than this.
_SHARD_BYTES, _MOST_SHARDS = 2 * 10**8, 64

# Families of dense models, and the mixture that each becomes.
_BECOMES = "llama and mistral, which become mixtral, and qwen3, which becomes qwen3_moe"


@dataclass(frozen=True)
class Upcycling:
    """Settings for upcycling a dense model: `top_k` of `experts` run for each token.

    noise: standard deviation of the noise added to each copy's weights, in standard deviations of the weight (0: equal copies).
    shared_expert: adds one more copy that every token passes through. It and the routed experts give half of the output each.
    seed: random seed of router and noise.
    """

    experts: int
    top_k: int
    noise: float = 0.0
    shared_expert: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raises UserError for settings that do not make a mixture, naming the option."""
        if self.experts < 2:
            raise UserError(f"--experts {self.experts}: a mixture has at least 2 experts")
        if not 1 <= self.top_k <= self.experts:
            raise UserError(f"--top-k {self.top_k}: must be between 1 and --experts {self.experts}")
        if not 0 <= self.noise <= 1:
            raise UserError(f"--noise {self.noise:g}: must be between 0 and 1 standard deviations of a weight")


@dataclass(frozen=True)
class Mixture:
    """The mixture that a dense checkpoint becomes: its configuration, the layout that it is written in, and its dtype."""

    dense: Path
    config: ModelConfig
    family: Family
    dtype: torch.dtype

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in Transformer(self.config).parameters())


def mixture_of(dense: Path, settings: Upcycling) -> Mixture:
    """Chooses family and configuration of the mixture that a dense checkpoint becomes: the Hugging Face family of mixtures that has
    all its features or, with a shared expert, which those families lack, nmoe's own layout. Raises UserError for a model that is a
    mixture already, and for one that no family of mixtures fits."""
    settings.check()
    family, config = read_config(dense)
    if config.experts:
        raise UserError(f"{dense}: a mixture of {config.experts} experts already; upcycling begins with a dense model")
    values = {
        "experts": settings.experts,
        "experts_per_token": settings.top_k,
        "expert_width": config.intermediate_size,
    }
    mixture = ModelConfig.from_dict(config.to_dict() | values | {"intermediate_size": 0})
    try:
        becomes = family_of(mixture)
    except UserError as error:
        raise UserError(f"{dense}: {family.MODEL_TYPE} cannot be upcycled, but {_BECOMES}: {error}") from None
    if settings.shared_expert:
        becomes, mixture = native, ModelConfig.from_dict(mixture.to_dict() | {"shared_experts": 1})
    return Mixture(dense, mixture, becomes, stored_dtype(dense))


def write_mixture(mixture: Mixture, settings: Upcycling, directory: Path) -> None:
    """Writes the mixture's weights and configuration into an existing directory, without a tokenizer. Memory holds one layer's
    experts and one shard (200 MB, or a 64th of the model if that is more). Raises UserError as `load_model` does."""
    with torch.device("meta"):
        state = {name: tensor.to(mixture.dtype) for name, tensor in Transformer(mixture.config).state_dict().items()}
    gather = _weights(mixture, settings, state)
    shard_bytes = max(_SHARD_BYTES, sum(tensor.nbytes for tensor in state.values()) // _MOST_SHARDS)
    generation = read_generation(mixture.dense)
    write_checkpoint(state, mixture.config, generation, directory, mixture.family, shard_bytes, gather)


def _weights(mixture: Mixture, settings: Upcycling, state: dict[str, Tensor]) -> Callable[[str], Tensor]:
    """Returns a function that makes a weight of the mixture, given its name in `state`."""
    family, config = read_config(mixture.dense)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Transformer(config).state_dict().items()}
    read = reader(family, config, open_tensors(mixture.dense))
    order = {name: index for index, name in enumerate(state)}

    def dense(name: str) -> Tensor:
        return read(name, torch.empty(shapes[name], dtype=mixture.dtype))

    # Checkpoints name an expert's gate, up and down after one another, which are parts of two of our weights.
    @lru_cache(maxsize=2)
    def weight(name: str) -> Tensor:
        block, _, part = name.partition(".ffn.")
        share = 0.5 if settings.shared_expert else 1.0
        generator = torch.Generator().manual_seed(settings.seed * len(order) + order[name])
        if part == "router.weight":
            return (torch.randn(state[name].shape, generator=generator) * _ROUTER_STD).to(mixture.dtype)
        if part == "router.bias":
            return torch.zeros(state[name].shape, dtype=mixture.dtype)
        if part == "gate_up":
            return _copies(dense(f"{block}.ffn.gate_up_proj.weight").t(), settings, generator)
        if part == "down":
            return _copies(dense(f"{block}.ffn.down_proj.weight").t() * share, settings, generator)
        if part == "shared.gate_up_proj.weight":
            return dense(f"{block}.ffn.gate_up_proj.weight")
        if part == "shared.down_proj.weight":
            return dense(f"{block}.ffn.down_proj.weight") * share
        return dense(name)

    return weight


def _copies(weight_DF: Tensor, settings: Upcycling, generator: torch.Generator) -> Tensor:
    """Copies a dense weight for every expert, `[E, D, F]`, with noise if the settings ask for it."""
    copies_EDF = weight_DF.repeat(settings.experts, 1, 1)
    if settings.noise:
        std = settings.noise * float(weight_DF.float().std())
        for copy_DF in copies_EDF:
            copy_DF.copy_(copy_DF.float() + std * torch.randn(copy_DF.shape, generator=generator))
    return copies_EDF
