"""Reads and writes adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Names come from the base's Hugging Face checkpoint. The experts' weights are parameters there, `mlp.experts.gate_up_proj` and
`mlp.experts.down_proj`. PEFT adapts them by wrapping their module once for each, so the update of the one wrapped first has
`base_layer` in its name. An adapter written by nmoe also has `base.json`: the base's fingerprint, and the profile of its experts.
"""

# Shapes: D inputs, F outputs, E experts, r rank.

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmoe.config.tables.model import ExpertProfile
from nmoe.errors import UserError
from nmoe.model.families import family_of
from nmoe.model.families.base import identity
from nmoe.model.lora import EXPERTS, Lora, LoraSettings, Site, sites
from nmoe.model.snapshot import Snapshot, hold
from nmoe.model.transformer import Transformer
from nmoe.parsing import json_object

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"

_PREFIX = "base_model.model."
# PEFT settings that change what an adapter computes, with the values that leave it unchanged.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),  # the others change the base too
    **dict.fromkeys(
        (
            *("alora_invocation_tokens", "arrow_config", "exclude_modules", "fan_in_fan_out", "kasa_config", "layer_replication"),
            *("layers_pattern", "layers_to_transform", "lora_bias", "megatron_config", "modules_to_save", "monteclora_config"),
            *("trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "velora_config"),
        ),
        (None, False, [], {}),
    ),
}  # fmt: skip
_SHOWN = 5


@dataclass(frozen=True)
class Adapter:
    """The content of an adapter's directory, checked against a model: `parts` has A and B of each projection, shaped as by
    `Lora.part`; `notes` has warnings for the user."""

    settings: LoraSettings
    base: str
    parts: dict[Site, tuple[Tensor, Tensor]]
    notes: tuple[str, ...]

    def attach(self, model: Transformer, base: str, fingerprint: str) -> Lora:
        """Attaches the adapter to `model`, which must be the model that it was read for."""
        lora = Lora(model, self.settings, list(self.parts), base, fingerprint)
        self.copy_to(lora)
        return lora

    @torch.no_grad()
    def copy_to(self, lora: Lora) -> None:
        for site, tensors in self.parts.items():
            for ours, theirs in zip(lora.part(site), tensors, strict=True):
                ours.copy_(theirs)


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).exists() and not (directory / "config.json").exists()


def adapter_tensors(lora: Lora) -> dict[str, Tensor]:
    """Returns the adapter's tensors under PEFT's names: all that a remote engine needs when a new version is published."""
    names, orders, tensors = _names(lora.sites), _row_orders(lora.model), {}
    for site in lora.sites:
        a, b = lora.part(site)
        if site.theirs in orders:
            b = b[..., orders[site.theirs].argsort(), :]
        if site.target in EXPERTS:
            # [E, r, D] -> [E * r, D]; [E, F, r] -> [F, r * E]
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        for name, tensor in zip(names[site], (a, b), strict=True):
            tensors[name] = tensor.contiguous()
    return tensors


def save_adapter(lora: Lora, directory: Path) -> None:
    """Writes an adapter that PEFT loads into an existing directory, together with the base's fingerprint."""
    snapshot_adapter(lora, copied=False).write(directory)


def snapshot_adapter(lora: Lora, copied: bool) -> Snapshot:
    """Returns a snapshot of the files that `save_adapter` would write now. With `copied`, later training steps do not change it."""
    settings, alpha = lora.settings, lora.settings.alpha
    experts = dict.fromkeys(site.target for site in lora.sites if site.target in EXPERTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lora.base,
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": settings.rslora,
        "rank_pattern": settings.rank_pattern,
        "alpha_pattern": settings.alpha_pattern,
        "target_modules": _target_modules(lora),
        "target_parameters": [f"mlp.{target}" for target in experts] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    profile = lora.model.config.expert_profile or "none"
    base = {"path": lora.base, "fingerprint": lora.fingerprint, "expert_profile": profile}
    tensors, size = hold(adapter_tensors(lora), copied)

    def write(directory: Path) -> None:
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        save_file(on_host, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / BASE).write_text(json.dumps(base, indent=2) + "\n")

    return Snapshot(write, size)


def _target_modules(lora: Lora) -> list[str]:
    """Returns the names by which PEFT finds the adapted modules: a name's last part or, if only some layers are adapted, the whole
    name."""
    chosen = [site for site in lora.sites if site.target not in EXPERTS]
    left = {site.target for site in sites(lora.model)} & {
        site.target for site in sites(lora.model) if site not in lora.sites
    }
    return sorted({site.theirs if site.target in left else site.target for site in chosen})


@dataclass(frozen=True)
class Base:
    """The base that an adapter was trained beside: its path ("" if the adapter names none), and, None if the adapter does not
    record them, its fingerprint and the profile that its experts computed in."""

    path: str
    fingerprint: str | None = None
    expert_profile: ExpertProfile | Literal["none"] | None = None


def read_base(directory: Path) -> Base:
    """Reads what an adapter's directory says of its base. Raises UserError."""
    name = read_settings(directory)[1]
    if not (directory / BASE).exists():
        return Base(name)
    raw = json_object(directory / BASE)
    profile = raw.get("expert_profile")
    if not isinstance(raw.get("path"), str) or not isinstance(raw.get("fingerprint"), str):
        raise UserError(f"{directory / BASE}: torn: it holds the base's path and fingerprint")
    if profile not in (None, "none", *get_args(ExpertProfile)):
        raise UserError(f"{directory / BASE}: expert_profile = {profile!r} is not a profile that this version knows")
    return Base(raw["path"], raw["fingerprint"], profile)


def read_settings(directory: Path) -> tuple[LoraSettings, str, dict[str, Any]]:
    """Reads an adapter's settings, its base's name ("" if there is none) and all of adapter_config.json. Raises UserError if the
    file is damaged or describes something other than the LoRA that nmoe supports."""
    file = directory / CONFIG
    raw = json_object(file, f"an adapter is {CONFIG} and {WEIGHTS}")
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type = {raw.get('peft_type')!r} is not supported; nmoe trains and loads LORA")
    for key, nothing in _NOTHING.items():
        if raw.get(key) not in nothing:
            raise UserError(f"{file}: {key} = {raw[key]!r} is not supported")
    try:
        settings = LoraSettings(
            rank=raw.get("r", 8),
            alpha=raw.get("lora_alpha", 8),
            rslora=bool(raw.get("use_rslora", False)),
            rank_pattern=raw.get("rank_pattern") or {},
            alpha_pattern=raw.get("alpha_pattern") or {},
        )
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return settings, raw.get("base_model_name_or_path") or "", raw


def read_adapter(model: Transformer, directory: Path, tensors: dict[str, Tensor] | None = None) -> Adapter:
    """Reads an adapter for this model; `tensors` is its file's content, if that has been read. Raises UserError, naming file and
    tensor, for missing or damaged files, an adapter made for another base, and values that are not finite."""
    settings, base, raw = read_settings(directory)
    file = directory / WEIGHTS
    try:
        tensors = load_file(file) if tensors is None else dict(tensors)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; an adapter is {CONFIG} and {WEIGHTS}") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: torn or not a safetensors file: {error}") from None
    wanted = _targeted(model, raw, directory / CONFIG)
    parts, problems = {}, []
    for site, names in _names(wanted).items():
        rank, _ = settings.of(site)
        found = []
        for name, shape in zip(names, _shapes(model, site, rank), strict=True):
            if (tensor := tensors.pop(name, None)) is None:
                problems.append(f"{name} is missing")
                continue
            found.append(tensor)
            if tuple(tensor.shape) != shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, this base and rank {rank} want {list(shape)}")
            elif not tensor.is_floating_point() or not tensor.isfinite().all():
                raise UserError(f"{file}: {name} holds NaN or infinite values")
        parts[site] = tuple(found)
    problems += [f"{name} belongs to no projection of this base" for name in sorted(tensors)]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(f"{file}: an adapter for another base: {'; '.join(problems[:_SHOWN])}{more}")
    notes = []
    if raw.get("lora_dropout"):
        notes.append(f"{directory}: trained with lora_dropout = {raw['lora_dropout']}; here it goes on without")
    targets = tuple(dict.fromkeys(site.target for site in wanted))
    settings = LoraSettings(
        settings.rank, settings.alpha, settings.rslora, targets, settings.rank_pattern, settings.alpha_pattern
    )
    orders = _row_orders(model)
    ours = {site: _to_ours(model, site, orders.get(site.theirs), *tensors) for site, tensors in parts.items()}
    return Adapter(settings, base, ours, tuple(notes))


def base_notes(directory: Path, base: str, fingerprint: str) -> list[str]:
    """Returns warnings if the adapter in `directory` was trained on another base than this one, judged by fingerprint or else by
    name."""
    theirs = read_base(directory)
    by_name = bool(theirs.path) and Path(theirs.path).name != Path(base).name
    other = by_name if theirs.fingerprint is None else theirs.fingerprint != fingerprint
    return [f"{directory}: trained beside another base, {theirs.path}, than {base}"] if other else []


def resume_adapter(lora: Lora, directory: Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Loads into `lora` the tensors that `save_adapter` wrote; `tensors` are they, if they have been read. Raises UserError if the
    base or the settings have changed or a file is damaged; `lora` is then unchanged."""
    base, profile = read_base(directory), lora.model.config.expert_profile or "none"
    if base.fingerprint != lora.fingerprint:
        raise UserError(
            f"{directory}: trained beside the base {base.path} when that had the fingerprint {base.fingerprint}; {lora.base} now "
            f"holds another configuration or other weights ({lora.fingerprint}). Put the base back, or start a new run"
        )
    if base.expert_profile not in (None, profile):
        raise UserError(
            f"{directory}: trained beside experts in the profile {base.expert_profile}, and this run's model.expert_weights holds "
            f"them in {profile}; set it back, or start a new run"
        )
    adapter = read_adapter(lora.model, directory, tensors)
    if {site: adapter.settings.of(site) for site in adapter.parts} != {
        site: lora.settings.of(site) for site in lora.sites
    }:
        raise UserError(f"{directory / CONFIG}: has other targets, or another rank or scale, than this run's [lora]")
    adapter.copy_to(lora)


def _targeted(model: Transformer, raw: dict[str, Any], file: Path) -> list[Site]:
    """Returns the projections that an adapter's configuration selects, by PEFT's rules. Raises UserError if this base lacks one
    that is named, or has none that is selected."""
    modules, parameters = raw.get("target_modules") or [], raw.get("target_parameters") or []
    every = modules == "all-linear"
    suffixes = [] if isinstance(modules, str) else modules
    pattern = re.compile(modules) if isinstance(modules, str) and not every else None

    def chosen(site: Site) -> bool:
        if site.target in EXPERTS:
            return any(f".{site.theirs}".endswith(f".{name}") for name in parameters)
        named = any(f".{site.theirs}".endswith(f".{name}") for name in suffixes)
        return every or named or (pattern is not None and pattern.fullmatch(site.theirs) is not None)

    found = [site for site in sites(model) if chosen(site)]
    for name in [*suffixes, *parameters]:
        if not any(f".{site.theirs}".endswith(f".{name}") for site in found):
            raise UserError(f"{file}: an adapter for another base: it adapts {name!r}, which this one does not have")
    if not found:
        raise UserError(f"{file}: target_modules = {modules!r} adapts nothing of this base")
    return found


def _names(chosen: Any) -> dict[Site, tuple[str, str]]:
    """Returns PEFT's tensor names of A and B for each projection."""
    modules = {site.theirs for site in chosen}
    names = {}
    for site in chosen:
        module = site.theirs
        if site.target in EXPERTS:
            module = module.rpartition(".")[0]
            if site.target == "experts.gate_up_proj" and f"{module}.down_proj" in modules:
                module += ".base_layer"
        names[site] = f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"
    return names


def _widths(model: Transformer, site: Site) -> tuple[int, int, int]:
    """Returns a projection's number of inputs, its number of outputs, and the number of experts that have such a projection (1: not
    an expert's)."""
    outputs = site.span[1] - site.span[0]
    if site.target in EXPERTS:
        config = model.config
        inputs = config.hidden_size if site.target == "experts.gate_up_proj" else config.expert_width
        return inputs, outputs, config.experts
    weight_FD = model.get_parameter(f"{site.ours}.weight")
    return weight_FD.shape[1], outputs, 1


def _shapes(model: Transformer, site: Site, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    inputs, outputs, experts = _widths(model, site)
    return (experts * rank, inputs), (outputs, rank * experts)


def _to_ours(model: Transformer, site: Site, order_F: Tensor | None, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if site.target in EXPERTS:
        experts = model.config.experts
        a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    return a, b if order_F is None else b[..., order_F, :]


def _row_orders(model: Transformer) -> dict[str, Tensor]:
    """Returns, for projections whose outputs the base's family stores in another order, the stored index of each of our outputs.

    A family's entry converts a stored weight by permuting its outputs. Applied to a weight in which each row holds its own number,
    it yields the permutation.
    """
    try:
        entries = family_of(model.config).entries(model.config)
    except UserError:  # a model outside all families keeps the names and order of `sites`
        return {}
    orders = {}
    for entry in entries:
        if entry.read is identity:
            continue
        if entry.ours.endswith(".weight") and len(entry.shape) == 2:
            numbers_FD = torch.arange(entry.shape[0]).unsqueeze(1).expand(entry.shape)
            orders[entry.theirs.removesuffix(".weight")] = entry.read(numbers_FD)[:, 0]
        elif entry.stacked and len(entry.shape) == 3:  # all experts' in one, with outputs last
            orders[entry.theirs] = entry.read(torch.arange(entry.shape[2]).expand(1, 1, -1))[0, 0]
    return orders
