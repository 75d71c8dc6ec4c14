"""The LoRA adapter of a model: which projections have low-rank updates, and operations on all updates together.

Projections have their Hugging Face names, because an adapter's files and settings name the modules of a checkpoint. Our decoder
holds several projections in one matrix; a `Site` says which outputs of which matrix a projection is.
"""

# Shapes: D inputs, F outputs, E experts, r rank.

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor, nn

from nmoe.errors import UserError
from nmoe.model.layers import Linear
from nmoe.model.low_rank import ExpertsLowRank, LowRank
from nmoe.model.moe import MoE
from nmoe.model.packed_experts import PackedExperts
from nmoe.model.transformer import Transformer

# In a mixture of experts only attention is adapted by default (the router never is): each expert sees few tokens, and the
# experts' adapters would be most of the size.
ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkvz", "out_proj"),
)
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class LoraSettings:
    """Rank and scale of an adapter, and the projections that have a low-rank update (empty: the usual ones for the architecture).
    Raises UserError for a rank below 1 and an alpha that is not above 0.

    The update's scale is `alpha / rank`, or `alpha / sqrt(rank)` with `rslora` (Kalajdzievski 2023, arXiv:2312.03732).
    `rank_pattern` and `alpha_pattern` are PEFT's: other values where a regular expression matches the end of a module's name.
    """

    rank: int = 32
    alpha: float = 64.0
    rslora: bool = False
    targets: tuple[str, ...] = ()
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.rank_pattern.values()):
            if type(rank) is not int or rank < 1:
                raise UserError(f"lora rank = {rank!r} is not a whole number from 1 up")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
                raise UserError(f"lora alpha = {alpha!r} is not a number above 0")

    def of(self, site: Site) -> tuple[int, float]:
        """Returns the rank and the scale of the update of this projection."""
        rank = _by_pattern(self.rank_pattern, site.theirs, self.rank)
        alpha = _by_pattern(self.alpha_pattern, site.theirs, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rslora else rank)


def _by_pattern(patterns: dict[str, N], name: str, default: N) -> N:
    """Returns the value of the first pattern that matches a module's name as in PEFT, or the default."""
    return next((value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", name)), default)


@dataclass(frozen=True)
class Site:
    """One projection that can have an update: its name in a Hugging Face checkpoint and its outputs in our decoder's weights.

    Example, the keys of layer 0 with four query and two key heads of width 8: `Site("k_proj", "model.layers.0.self_attn.k_proj",
    "blocks.0.attention.qkv_proj", (32, 48))`.
    """

    target: str  # as settings name it
    theirs: str  # the module in a Hugging Face checkpoint, or the parameter where it is one of the experts'
    ours: str  # the module in ours; a MoE layer where the target is one of the experts'
    span: tuple[int, int]  # its outputs among our weight's


def sites(model: Transformer) -> list[Site]:
    """Returns every projection of the model that can have an update, in the order of the layers."""
    config, found = model.config, []

    def add(theirs: str, ours: str, *names_and_widths: tuple[str, int]) -> None:
        first = 0
        for name, width in names_and_widths:
            found.append(Site(name, f"{theirs}.{name.rpartition('.')[2]}", ours, (first, first + width)))
            first += width

    for layer in range(config.layers):
        theirs, ours, width = f"model.layers.{layer}", f"blocks.{layer}", config.hidden_size
        attention, latent = f"{theirs}.self_attn", config.latent
        if layer in config.recurrent_layers:
            assert config.delta is not None, "the configuration was checked"
            delta, mixer = config.delta, f"{theirs}.linear_attn"
            add(mixer, f"{ours}.attention.in_proj", ("in_proj_qkvz", delta.channels + delta.values))
            add(mixer, f"{ours}.attention.gate_proj", ("in_proj_ba", 2 * delta.value_heads))
            add(mixer, f"{ours}.attention.o_proj", ("out_proj", width))
        elif latent is None:
            keys = config.kv_heads * config.head_dim
            queries = config.heads * config.head_dim * (1 + config.attention_gate)
            add(attention, f"{ours}.attention.qkv_proj", ("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
        else:
            if latent.q_rank:
                add(attention, f"{ours}.attention.q_a_proj", ("q_a_proj", latent.q_rank))
            name = "q_b_proj" if latent.q_rank else "q_proj"
            add(attention, f"{ours}.attention.q_proj", (name, config.heads * config.head_dim))
            add(attention, f"{ours}.attention.kv_a_proj", ("kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim))
            expanded = config.heads * (latent.nope_dim + latent.value_dim)
            add(attention, f"{ours}.attention.kv_b_proj", ("kv_b_proj", expanded))
        if layer in config.attention_layers:
            add(attention, f"{ours}.attention.o_proj", ("o_proj", width))
        if layer in config.moe_layers:
            add(f"{theirs}.mlp.experts", f"{ours}.ffn", ("experts.gate_up_proj", 2 * config.expert_width))
            add(f"{theirs}.mlp.experts", f"{ours}.ffn", ("experts.down_proj", width))
            if config.shared_experts:
                inner = config.shared_experts * config.expert_width
                name = "shared_expert" if config.shared_gate else "shared_experts"
                mlp, ffn = f"{theirs}.mlp.{name}", f"{ours}.ffn.shared"
                add(mlp, f"{ffn}.gate_up_proj", ("gate_proj", inner), ("up_proj", inner))
                add(mlp, f"{ffn}.down_proj", ("down_proj", width))
            if config.shared_gate:
                add(f"{theirs}.mlp", f"{ours}.ffn.shared_gate", ("shared_expert_gate", 1))
        else:
            inner = config.intermediate_size
            add(f"{theirs}.mlp", f"{ours}.ffn.gate_up_proj", ("gate_proj", inner), ("up_proj", inner))
            add(f"{theirs}.mlp", f"{ours}.ffn.down_proj", ("down_proj", width))
    return found


def choose(model: Transformer, targets: tuple[str, ...]) -> list[Site]:
    """Returns the projections that these targets name. Without targets: attention's projections and, in a dense model, the MLP's.
    Raises UserError, with the closest name, for a target that the model does not have."""
    known = sites(model)
    names = {site.target for site in known}
    if not targets:
        targets = tuple(names & set(ATTENTION if model.config.routed_experts else (*ATTENTION, *MLP)))
    for target in targets:
        if target not in names:
            alike = difflib.get_close_matches(target, sorted(names), n=1)
            hint = f"; did you mean {alike[0]!r}?" if alike else ""
            raise UserError(f"lora target {target!r} is not in this model, which has {', '.join(sorted(names))}{hint}")
    return [site for site in known if site.target in targets]


def refuse_high_rank(model: Transformer, chosen: Sequence[Site], rank: int) -> None:
    """Raises UserError if the rank of a new adapter is above the smallest dimension of the weights that it adapts: a higher rank
    only takes memory. Weights with one output (`shared_expert_gate`) do not limit the rank of the others."""
    shapes = {site: shape for site in chosen if min(shape := _shape(model, site)) > 1}
    smallest = min(shapes, key=lambda site: min(shapes[site]), default=None)
    if smallest is not None and rank > (most := min(shapes[smallest])):
        outputs, inputs = shapes[smallest]
        raise UserError(
            f"lora.rank = {rank} is more than {most}, the smallest dimension of the adapted weights: {smallest.theirs} has "
            f"{outputs} outputs and {inputs} inputs; set lora.rank to {most} or less"
        )


def _shape(model: Transformer, site: Site) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs of a projection; of experts, the numbers of a single expert."""
    module, (first, end) = model.get_submodule(site.ours), site.span
    if isinstance(module, MoE):
        return (
            end - first,
            model.config.expert_width if site.target == "experts.down_proj" else model.config.hidden_size,
        )
    assert isinstance(module, Linear), f"{site.ours} is neither a linear layer nor a mixture of experts"
    return end - first, module.weight.shape[1]


class Lora:
    """The adapter of a model, whose weights it freezes.

    The updates are modules inside the layers that they belong to. Learner and engine run base and adapter side by side; the two
    are never added together.

    base: the base checkpoint's directory; fingerprint: of the base's configuration and weights; notes: warnings for the user
    about the adapter that was loaded.
    """

    def __init__(
        self, model: Transformer, settings: LoraSettings, chosen: Sequence[Site], base: str, fingerprint: str
    ) -> None:
        """Freezes the model and attaches updates to the chosen projections. B is zero, so the model's results do not change yet; A
        is set by `initialize` or read from a file. Raises UserError, with nothing attached, if projections that are computed as one
        matrix have different ranks."""
        self.model, self.settings, self.sites = model, settings, tuple(chosen)
        self.base, self.fingerprint = base, fingerprint
        self.notes: tuple[str, ...] = ()
        self._parts: dict[Site, tuple[Tensor, Tensor]] = {}
        self._attached: list[tuple[nn.Module, str, str, LowRank | ExpertsLowRank]] = []
        model.requires_grad_(False)
        try:
            for ours, group in groupby(self.sites, key=lambda site: site.ours):
                module, of_module = model.get_submodule(ours), list(group)
                if isinstance(module, MoE):
                    for site in of_module:
                        self._adapt_experts(module, site)
                else:
                    assert isinstance(module, Linear), f"{ours} is neither a linear layer nor a mixture of experts"
                    self._adapt_linear(module, of_module)
        except BaseException:
            self.detach()
            raise

    def _adapt_linear(self, module: Linear, of_module: list[Site]) -> None:
        settings = {self.settings.of(site) for site in of_module}
        if len(settings) > 1:
            names = ", ".join(site.theirs for site in of_module)
            raise UserError(f"{names} are computed as one matrix here and need one rank and one alpha")
        rank, scale = settings.pop()
        spans = tuple(site.span for site in of_module)
        update = LowRank(module.weight.shape[1], spans, rank, scale, self._like(module.weight))
        for site, (_, ranks, rows) in zip(of_module, update.parts(), strict=True):
            self._parts[site] = update.a_GD[ranks], update.b_Sr[rows]
        self._put(module, "weight", "adapter", update)

    def _adapt_experts(self, module: MoE, site: Site) -> None:
        name = "down" if site.target == "experts.down_proj" else "gate_up"
        packed: PackedExperts | None = getattr(module, f"{name}_packed")
        weight = getattr(module, name) if packed is None else self.model.embedding.weight
        (experts, inputs, outputs), (rank, scale) = (packed or weight).shape, self.settings.of(site)
        update = ExpertsLowRank(experts, inputs, outputs, rank, scale, self._like(weight))
        self._parts[site] = update.a_EDr.mT, update.b_ErF.mT
        self._put(module, name, f"{name}_adapter", update)

    def _like(self, weight: Tensor) -> Tensor:
        """Returns a tensor of the weight's dtype where the model computes, which an offloaded weight is not."""
        return torch.empty(0, dtype=weight.dtype, device=self.model.device)

    def _put(self, module: nn.Module, weight: str, name: str, update: LowRank | ExpertsLowRank) -> None:
        setattr(module, name, update)
        self._attached.append((module, weight, name, update))

    def part(self, site: Site) -> tuple[Tensor, Tensor]:
        """Returns views of one projection's A `[r, D]` and B `[F, r]`; for experts, `[E, r, D]` and `[E, F, r]`."""
        a, b = self._parts[site]
        return a.detach(), b.detach()

    @torch.no_grad()
    def initialize(self, seed: int) -> Lora:
        """Draws A uniformly within `inputs ** -0.5`, as PEFT does, and sets B to zero, so that the adapter does not change the
        model at first."""
        generator = torch.Generator().manual_seed(seed)
        for site in self.sites:
            a, b = self.part(site)
            a.copy_((2 * torch.rand(a.shape, generator=generator) - 1) * a.shape[-1] ** -0.5)
            b.zero_()
        return self

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for *_, update in self._attached for parameter in update.parameters()]

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[Transformer]:
        """Gives the adapter's `parameters` these earlier values inside the context. Afterwards the trained values are back, in the
        same tensors."""
        parameters = self.parameters()
        trained = [parameter.data for parameter in parameters]
        try:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data = value
            yield self.model
        finally:
            for parameter, own in zip(parameters, trained, strict=True):
                parameter.data = own

    def detach(self) -> None:
        """Removes the adapter: the model is then the base, bit for bit, and another adapter can be attached to it."""
        for module, _, name, _ in self._attached:
            setattr(module, name, None)

    def attach(self) -> None:
        """Puts a detached adapter back."""
        for module, _, name, update in self._attached:
            setattr(module, name, update)

    @contextmanager
    def attached(self) -> Iterator[Transformer]:
        """Attaches a detached adapter inside the context."""
        self.attach()
        try:
            yield self.model
        finally:
            self.detach()

    @contextmanager
    def disabled(self) -> Iterator[Transformer]:
        """Removes the adapter inside the context: the model is then the base, bit for bit."""
        self.detach()
        try:
            yield self.model
        finally:
            self.attach()

    @contextmanager
    def merged(self) -> Iterator[Transformer]:
        """Adds the updates to the model's weights and removes the adapter inside the context, as an export needs it. Afterwards the
        base's weights are back, unchanged. Inside, adapted weights take memory twice. Adapted experts must not be packed."""
        frozen = [getattr(module, weight) for module, weight, _, _ in self._attached]
        with self.disabled():
            try:
                for (module, weight, _, update), before in zip(self._attached, frozen, strict=True):
                    setattr(module, weight, nn.Parameter(update.merged(before), requires_grad=False))
                yield self.model
            finally:
                for (module, weight, _, _), before in zip(self._attached, frozen, strict=True):
                    setattr(module, weight, before)

    def updates(self) -> dict[str, LowRank | ExpertsLowRank]:
        """Returns the low-rank updates, keyed by the name of the weight that each one changes."""
        names = {module: name for name, module in self.model.named_modules()}
        return {f"{names[module]}.{weight}": update for module, weight, _, update in self._attached}

    def describe(self) -> list[str]:
        """Returns lines such as `adapter: 24,576 parameters beside 1,203,456 (2.0%), at q_proj, o_proj; rank 8, alpha 16`."""
        own = sum(parameter.numel() for parameter in self.parameters())
        packed = (one for one in self.model.modules() if isinstance(one, PackedExperts))
        every = sum(one.numel() for one in self.model.parameters()) + sum(math.prod(one.shape) for one in packed)
        targets = ", ".join(dict.fromkeys(site.target for site in self.sites))
        return [
            f"adapter: {own:,} parameters beside {every - own:,} ({own / (every - own):.1%}), at {targets}; "
            f"rank {self.settings.rank}, alpha {self.settings.alpha:g}",
            *self.notes,
        ]
