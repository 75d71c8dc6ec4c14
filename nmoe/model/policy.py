"""Loads the policy of a run's checkpoint: a model, or an adapter on the base that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import torch

from nmoe.config.tables.model import ExpertProfile
from nmoe.errors import UserError
from nmoe.gguf_file import is_gguf
from nmoe.model.checkpoint import fingerprint, load_model, packed_form, read_config, stored_dtype
from nmoe.model.config import ModelConfig
from nmoe.model.device import choose_device, dtype_for, kind_of
from nmoe.model.lora import Lora
from nmoe.model.low_rank import ExpertsLowRank, LowRank
from nmoe.model.peft_format import BASE, base_notes, is_adapter, read_adapter, read_base
from nmoe.model.precision import set_expert_profile
from nmoe.model.transformer import Transformer
from nmoe.types import ExpertWeightsForm, PackedForm, Precision


def load_policy(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    expert_weights: ExpertWeightsForm = "dequantized",
) -> tuple[Transformer, Lora | None]:
    """Loads the model of a checkpoint; if the checkpoint is an adapter, loads its base and attaches the adapter, which is also
    returned (else None).

    The base's experts compute in the profile that the adapter was trained beside. Raises UserError as `load_model` and
    `read_adapter` do, if the base is not on this machine, if the base's weights differ from the weights that an nmoe adapter was
    trained with, and for `expert_weights` of another profile.
    """
    if not is_adapter(directory):
        return load_model(directory, dtype, device, expert_weights), None
    base, trained_beside = base_of(directory), read_base(directory).fingerprint
    own = fingerprint(base)
    if trained_beside not in (None, own):
        raise UserError(
            f"{directory / BASE}: trained beside {base} when that had the fingerprint {trained_beside}; it now holds another "
            f"configuration or other weights ({own}). Put the base back"
        )
    model = load_model(base, dtype, device, expert_weights)
    if expert_weights == "dequantized" and (profile := profile_of(directory)) != model.config.expert_profile:
        set_expert_profile(model, profile)
    _refuse_other_profile(directory, model)
    adapter = read_adapter(model, directory)
    lora = adapter.attach(model, str(base), own)
    lora.notes = (*adapter.notes, *base_notes(directory, str(base), own))
    return model, lora


def profile_of(directory: Path) -> ExpertProfile | None:
    """Returns the profile that the experts of a checkpoint compute in, or an adapter's base beside it. Raises UserError
    for a broken checkpoint."""
    recorded = read_base(directory).expert_profile if is_adapter(directory) else None
    return config_of(directory).expert_profile if recorded is None else None if recorded == "none" else recorded


def _refuse_other_profile(directory: Path, model: Transformer) -> None:
    """Raises UserError if an adapter was trained beside experts in another profile than the model's. Whoever asks for
    packed experts may have them rounded beside an adapter that was trained beside full ones."""
    trained, profile = read_base(directory).expert_profile, model.config.expert_profile or "none"
    if trained not in (None, profile) and (packed_form(model) is None or trained != "none"):
        form = trained if trained in get_args(PackedForm) else "dequantized"
        raise UserError(
            f"{directory}: trained beside experts in the profile {trained}, and the base's are in {profile} here; load it with "
            f"expert_weights = {form!r}"
        )


def load_adapters(
    model: Transformer, base: Path, directories: Mapping[str, Path], base_fingerprint: str
) -> dict[str, Lora]:
    """Loads adapters of one base, by name, and leaves all of them detached from the model, which was loaded from `base`. Raises
    UserError as `read_adapter` does, for a model that has an adapter already, for a directory that holds none, and for an adapter
    that nmoe trained with other weights."""
    if any(isinstance(module, LowRank | ExpertsLowRank) for module in model.modules()):
        raise UserError(f"{base}: is an adapter itself; give its base, and this one among the adapters")
    loras = {}
    for name, directory in directories.items():
        if not is_adapter(directory):
            raise UserError(f"{directory}: holds no adapter (adapter_config.json and adapter_model.safetensors)")
        if (trained_beside := read_base(directory).fingerprint) not in (None, base_fingerprint):
            raise UserError(
                f"{directory}: trained beside weights with the fingerprint {trained_beside}; {base} has {base_fingerprint}"
            )
        _refuse_other_profile(directory, model)
        adapter = read_adapter(model, directory)
        lora = loras[name] = adapter.attach(model, str(base), base_fingerprint)
        lora.notes = (*adapter.notes, *base_notes(directory, str(base), base_fingerprint))
        lora.detach()
    return loras


def load_policy_on(
    directory: Path,
    device: str,
    expert_weights: ExpertWeightsForm = "dequantized",
    precision: Precision | None = None,
    named: str = "--device",
) -> Transformer:
    """Loads a checkpoint's policy for sampling onto the device that `device` names, in its `sampling_precision`; an adapter is
    attached to its base.

    Raises UserError as `load_policy` does, and for a missing device; the message names the option `named`.
    """
    on = choose_device(device, named)
    dtype = dtype_for(on, sampling_precision(directory, on, precision))
    return load_policy(directory, dtype, on, expert_weights)[0]


def sampling_precision(directory: Path, device: torch.device, asked: Precision | None = None) -> Precision:
    """Returns the precision in which a checkpoint is sampled: the one asked for, else bfloat16 on a GPU, and on a CPU bfloat16 if
    the weights are stored in it and the processor can multiply it, else float32. Raises UserError for a broken checkpoint."""
    if asked is not None:
        return asked
    return kind_of(device).sampling_precision(stored_dtype(base_of(directory) if is_adapter(directory) else directory))


def config_of(directory: Path) -> ModelConfig:
    """Returns the configuration of a checkpoint's model, or of an adapter's base. Raises UserError for a broken checkpoint."""
    return read_config(base_of(directory) if is_adapter(directory) else directory)[1]


def base_of(directory: Path) -> Path:
    """Returns the path of the base checkpoint that an adapter was trained on. Raises UserError if it is not on this machine."""
    base = read_base(directory).path
    if not (is_gguf(Path(base)) or (Path(base) / "config.json").exists()):
        raise UserError(
            f"{directory}: its base, {base or 'which it does not name'}, is neither a directory with a config.json nor a GGUF file"
        )
    return Path(base)
