"""Reads and writes model checkpoints: directories with `config.json` and safetensors, in nmoe's layout or a known Hugging Face
family's. Also computes a checkpoint's fingerprint, by which an adapter recognises its base.

Loading streams: each stored tensor is read, in pieces where possible, converted into a part of the model, and freed, so that peak
memory is little more than the model (`benchmarks/loading.py`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.generation import FILE as GENERATION
from nmoe.generation import TOKEN_IDS, read_generation
from nmoe.gguf_file import is_gguf
from nmoe.model.config import ModelConfig
from nmoe.model.families import FAMILIES, differences, family_of, gpt_oss, native
from nmoe.model.families.base import Family, Written, check_names, fill, tensors_of
from nmoe.model.families.compressed import quantization_config, refuse_stacked, stored_tensors
from nmoe.model.gguf.tensors import GGUFTensors, hf_config
from nmoe.model.mxfp4 import LARGEST_SCALE
from nmoe.model.packed_experts import MXFP4Experts, PackedExperts
from nmoe.model.precision import cast
from nmoe.model.shards import files_of, open_tensors, write_index, write_shards
from nmoe.model.snapshot import Snapshot, hold
from nmoe.model.transformer import Transformer
from nmoe.parallel.ranks import is_sharded
from nmoe.parsing import json_object
from nmoe.types import ExpertWeightsForm, PackedForm

# As large as the shards that transformers writes.
SHARD_BYTES = 5 * 10**9


Share = Callable[[Transformer], torch.device]
"""Shards a model on the device meta over ranks, and returns the device that the parts belong on."""


def load_model(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    expert_weights: ExpertWeightsForm = "dequantized",
    share: Share | None = None,
) -> Transformer:
    """Loads the model of a checkpoint directory onto `device`, with parameters in `dtype`; routers and buffers stay in fp32.

    With other `expert_weights` than "dequantized", experts are held packed and dequantised for each product: frozen, beside which
    an adapter can be trained, but not exported. "mxfp4" keeps experts that are stored in MXFP4, and gives the dequantised
    model's results. "fp8" and "nvfp4" quantise any experts while loading, and give the results of a model with this
    `expert_profile`. Raises UserError if the experts are not stored in MXFP4, or were trained in another profile.

    `share` shards the model over ranks, as in `new_model`: each rank then holds its part, and one whole weight at a time.

    Raises UserError, naming file and tensor, for a missing or damaged file, an unknown architecture, and weights that do not fit
    the configuration or are not finite. Peak memory is the model and its largest stored tensor, or only 20 MiB of that tensor if it
    is a table or stacked experts, which are read in pieces.
    """
    family, config = read_config(directory)
    shards, packed = open_tensors(directory), None if expert_weights == "dequantized" else expert_weights
    as_stored = packed == "mxfp4"
    if as_stored and not (
        family is gpt_oss and any(name.endswith("experts.down_proj_blocks") for name in shards.files)
    ):
        raise UserError(
            f"{directory}: its experts are not stored in MXFP4; load it with expert_weights = 'dequantized', 'fp8' or 'nvfp4'"
        )
    try:
        if packed is not None:
            config = in_profile_of(packed, config)
        model = new_model(config, dtype, device, packed, share)
    except UserError as error:
        raise UserError(f"{directory / 'config.json'}: {error}") from None
    model.generation = read_generation(directory)
    state, buffers = model.state_dict(), [name for name, _ in model.named_buffers()]
    found = {name.removesuffix("_packed"): one for name, one in model.named_modules() if isinstance(one, PackedExperts)}
    if as_stored:
        fill(state, family, config, shards, buffers, gpt_oss.packed_entries(config))
    else:
        state |= {name: torch.empty(one.shape, dtype=dtype, device="meta") for name, one in found.items()}
        fill(state, family, config, shards, buffers, quantised=found)
    for name, experts in found.items():
        if isinstance(experts, MXFP4Experts) and bool((experts.scales > LARGEST_SCALE).any()):
            raise UserError(f"{shards.listing}: the scales of {name} hold NaN or infinite values")
    return model


def in_profile_of(packed: PackedForm, config: ModelConfig) -> ModelConfig:
    """Returns the configuration of a model whose experts are held in this form: FP8 and NVFP4 compute in the profile of that name.
    Raises UserError for experts that were trained in another profile, and as `ModelConfig` does."""
    profile = None if packed == "mxfp4" else packed
    if config.expert_profile not in (None, profile):
        raise UserError(
            f"its experts were trained in {config.expert_profile}; hold them dequantized or in that, not in {packed}"
        )
    return ModelConfig.from_dict(config.to_dict() | {"expert_profile": profile})


def new_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    packed: PackedForm | None = None,
    share: Share | None = None,
) -> Transformer:
    """Allocates a model on `device` whose weights and router biases are not set yet; `packed` is the form of its experts.
    `share` shards the model over ranks before any memory is allocated, so that each rank allocates only its part, on the device
    that it returns. Raises UserError if the model does not fit into memory."""
    try:
        with torch.device("meta"):
            model = cast(Transformer(config), dtype)
            if packed is not None:
                for moe in model.moe_layers():
                    moe.pack(packed)
        parts = None if share is None else share(model)
        # As to_empty does, but for whole weights by a function that imports nothing of torch's compiler.
        model._apply(
            lambda weight: (
                torch.empty_like(weight, device=parts)
                if is_sharded(weight)
                else torch.empty(weight.shape, dtype=weight.dtype, device=device)
            )
        )
        model.reset_tables()
    except (RuntimeError, MemoryError) as error:
        if not _is_of_memory(error):
            raise
        raise UserError(
            f"{config.layers} layers of width {config.hidden_size}, a vocabulary of {config.vocab_size} and a context of "
            f"{config.context_tokens} are more than the memory of {device} can hold: {str(error).splitlines()[0][:120]}"
        ) from None
    return model


def _is_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Returns whether the error is a failed allocation. On a CPU, and for sizes beyond 63 bits, torch raises a plain
    RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in str(error) for sign in ("alloc", "overflow", "out of memory")
    )


def load_weights(model: Transformer, directory: Path) -> None:
    """Copies a checkpoint's weights into a model of the same configuration, converting to its dtype. Raises UserError as
    `load_model` does. If it does so because weights are not finite, the model must not be used."""
    family, config = read_config(directory)
    if other := differences(config, model.config):
        shown = ", ".join(
            f"{name} = {value!r} where the model has {getattr(model.config, name)!r}" for name, value in other.items()
        )
        raise UserError(f"{directory / 'config.json'}: of another model than the one to load into: {shown}")
    fill(model.state_dict(), family, config, open_tensors(directory), [name for name, _ in model.named_buffers()])


def save_model(model: Transformer, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes weights, balancing biases included, and configuration into an existing directory, in nmoe's own layout."""
    write_checkpoint(model.state_dict(), model.config, model.generation, directory, native, shard_bytes)


def copy_gguf(path: Path, directory: Path) -> None:
    """Writes weights and configuration of a GGUF file into an existing directory, as the Hugging Face checkpoint that it was made
    from. Weights are in bf16 where the file's are quantised or in bf16, otherwise in fp16 or fp32 as they are; experts in MXFP4
    stay so. One shard is held in memory at a time. Raises UserError as `load_model` does.
    """
    family, config = read_config(path)
    tensors = GGUFTensors(path)
    check_names(family, config, tensors)
    dtype = tensors.copied_dtype

    def copied(name: str) -> Written:
        as_it_is = tensors.dtype(name) == torch.uint8
        size = math.prod(tensors.shapes[name]) * (1 if as_it_is else dtype.itemsize)

        def make() -> Tensor:
            tensor = tensors.read(name)
            if as_it_is:
                return tensor
            tensor = tensor.to(dtype)
            if not all(bound.isfinite() for bound in torch.aminmax(tensor)):
                raise UserError(f"{path}: {name} holds NaN or infinite values")
            return tensor

        return name, size, make

    generation = read_generation(path)
    raw = hf_config(path) | {name: generation.get(name) for name in TOKEN_IDS}
    _write_settings(raw | {"torch_dtype": str(dtype).removeprefix("torch.")}, generation, directory)
    try:
        write_shards(directory, map(copied, tensors.files), SHARD_BYTES)
    except (RuntimeError, MemoryError) as error:
        if not _is_of_memory(error):
            raise
        raise UserError(
            f"{path}: a copy holds up to {SHARD_BYTES:,} bytes of it in memory, which are not free; end other programs, or name "
            "the file itself: every command takes it"
        ) from None


def snapshot_model(model: Transformer, copied: bool) -> Snapshot:
    """Returns a snapshot of the files that `save_model` would write now. With `copied`, later training steps do not change it."""
    state, size = hold(model.state_dict(), copied)
    config, generation = model.config, dict(model.generation)
    return Snapshot(lambda directory: write_checkpoint(state, config, generation, directory, native, SHARD_BYTES), size)


def sharded_model(model: Transformer) -> tuple[dict[str, dict[str, Tensor]], Snapshot]:
    """Returns the tensors that `save_model` would write, grouped by file (ranks may hold only parts of them), and a snapshot that
    writes the other files: configuration, generation settings if the model has any, and the index if there are several files of
    tensors."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}
    files = files_of(sizes, SHARD_BYTES)
    config, generation = native.config_to_hf(model.config), dict(model.generation)

    def write(directory: Path) -> None:
        _write_settings(config, generation, directory)
        write_index(directory, files, sizes)

    return {file: {name: state[name] for name in names} for file, names in files.items()}, Snapshot(write)


def export_model(
    model: Transformer,
    directory: Path,
    shard_bytes: int = SHARD_BYTES,
    gather: Callable[[str], Tensor] | None = None,
    first: bool = True,
    own_format: bool = False,
) -> None:
    """Writes a checkpoint that transformers loads, in the dtype of the parameters; experts with a quantisation profile are written
    in that profile, as compressed-tensors stores them. Creates the directory if needed.

    Chooses the Hugging Face family that has all features of the model; a loaded model returns to its own family. Where ranks hold
    parts of the model, every rank calls this function with a `gather`, which returns the whole tensor of a name once all ranks ask
    for it; only the `first` rank writes. With `own_format` it is a checkpoint that only nmoe loads. Raises UserError if no family
    has all features, for packed experts, for a profile if the family stores a layer's experts in one tensor, for weights that are
    not zero and that the family cannot store, such as a router's bias, and if the directory already holds a model, since shards of
    both would be mixed."""
    refuse_packed(model, "exported")
    if first and (old := sorted(directory.glob("*.safetensors*"))):
        raise UserError(f"{old[0]}: {directory} already holds a model; export to another directory")
    family, state = _exported(model, own_format)
    if first:
        directory.mkdir(parents=True, exist_ok=True)
        write_checkpoint(state, model.config, model.generation, directory, family, shard_bytes, gather)
    else:
        assert gather is not None, "ranks hold parts of the model"
        for _, _, make in _tensors(state, family, model.config, gather):
            make()


def checkpoint_tensors(
    model: Transformer, gather: Callable[[str], Tensor] | None = None, own_format: bool = False
) -> Iterator[Written]:
    """Yields the tensors that `export_model` would write, each as name, size in bytes and a function that makes it. Where ranks
    hold parts of the model, all of them call the functions in this order, with a `gather`. Raises UserError for a model that cannot
    be exported."""
    refuse_packed(model, "sent to another engine")
    family, state = _exported(model, own_format)
    return _tensors(state, family, model.config, gather)


def _exported(model: Transformer, own_format: bool) -> tuple[Family, dict[str, Tensor]]:
    """Returns the family that a model is written in, Hugging Face's or nmoe's own, and its weights. Raises UserError if that family
    cannot store one of them."""
    if own_format:
        return native, _own_state(model)
    family = family_of(model.config)
    refuse_stacked(family, model.config)
    state = _own_state(model)
    filled = {entry.ours for entry in family.entries(model.config)}
    for name, tensor in state.items():
        if name not in filled and tensor.any():
            raise UserError(
                f"{name} is not zero, and {family.MODEL_TYPE} cannot store it: routers of this family choose by score "
                "alone. Train with router_aux_loss_coef in place of router_bias_rate where export is wanted"
            )
    return family, state


def _own_state(model: Transformer) -> dict[str, Tensor]:
    """Returns the model's `state_dict` without the tensors of its adapter."""
    with torch.device("meta"):
        names = Transformer(model.config).state_dict()
    state = model.state_dict()
    return {name: state[name].detach() for name in names}


def stored_dtype(directory: Path) -> torch.dtype:
    """Returns the dtype of a checkpoint's stored embedding, which stands for all of its weights; fp32 if nmoe does not support that
    dtype. Raises UserError for a checkpoint that cannot be read."""
    family, config = read_config(directory)
    shards = open_tensors(directory)
    name = next(entry.theirs for entry in family.entries(config) if entry.ours == "embedding.weight")
    if name not in shards.files:
        raise UserError(f"{shards.listing}: {name} is missing")
    return shards.dtype(name) or torch.float32


def read_config(directory: Path) -> tuple[Family, ModelConfig]:
    """Reads the family of models and the decoder's configuration from a checkpoint's `config.json` or from a GGUF file. Raises
    UserError."""
    path, raw = _configuration(directory)
    model_type = raw.get("model_type")
    known = FAMILIES.names()
    # Only a name: `module:object`, which registries also take, would let a checkpoint choose an import.
    if model_type not in known:
        theirs = [name for name in known if name != native.MODEL_TYPE]
        nearest = difflib.get_close_matches(str(model_type), theirs, n=1, cutoff=0)[0]
        raise UserError(
            f"{path}: model_type = {model_type!r} is not a family nmoe knows; the nearest name is {nearest!r}, and it knows "
            f"{', '.join(sorted(known))}"
        )
    family: Family = FAMILIES.get(model_type)
    try:
        return family, family.config_from_hf(raw)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _configuration(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file that a checkpoint's configuration comes from, and its content as a Hugging Face `config.json`. Raises
    UserError for a damaged or missing file, and for an adapter's directory."""
    if is_gguf(checkpoint):
        return checkpoint, hf_config(checkpoint)
    path = checkpoint / "config.json"
    if not path.exists() and (checkpoint / "adapter_config.json").exists():
        raise UserError(f"{checkpoint}: an adapter, not a model; load the base that adapter_config.json names, with it")
    return path, json_object(path, "a checkpoint is a directory with config.json and model.safetensors, or a GGUF file")


def packed_form(model: Transformer) -> PackedForm | None:
    """Returns the form in which a model's experts are packed; None if they are not."""
    return next((moe.down_packed.form for moe in model.moe_layers() if moe.down_packed is not None), None)


def refuse_packed(model: Transformer, what: str) -> None:
    """Raises UserError if the model's experts are packed, because such weights are not parameters. `what` is what cannot be done,
    as in "exported"."""
    if packed_form(model) is not None:
        raise UserError(
            f"a model whose experts are packed cannot be {what}; load it with expert_weights = 'dequantized'"
        )


def write_checkpoint(
    state: dict[str, Tensor],
    model_config: ModelConfig,
    generation: dict[str, Any],
    directory: Path,
    family: Family,
    shard_bytes: int,
    gather: Callable[[str], Tensor] | None = None,
) -> None:
    """Writes a model's weights and configuration into an existing directory, in the layout of `family`. If `gather` is given, it
    returns each weight by name when that is written, and `state` only gives shapes and dtypes."""
    config = family.config_to_hf(model_config)
    if family is not native:
        config |= {name: generation.get(name) for name in TOKEN_IDS}
        config["torch_dtype"] = str(state["embedding.weight"].dtype).removeprefix("torch.")
        if (quantised := quantization_config(family, model_config)) is not None:
            config["quantization_config"] = quantised
    _write_settings(config, generation, directory)
    write_shards(directory, _tensors(state, family, model_config, gather), shard_bytes)


def _tensors(
    state: dict[str, Tensor], family: Family, config: ModelConfig, gather: Callable[[str], Tensor] | None
) -> Iterator[Written]:
    """Yields a checkpoint's tensors, each as name, size in bytes and a function that makes it. Experts are quantised by their
    profile if they have one, but nmoe's own format keeps the trained weights."""
    if family is native or config.expert_profile is None:
        return tensors_of(state, family.entries(config), gather)
    return stored_tensors(state, family, config, gather)


def _write_settings(config: dict[str, Any], generation: dict[str, Any], directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if generation:
        (directory / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")


# Settings that decoders had not when fingerprints were first written into adapters. At 0 or empty they leave a decoder as it was.
_LATER = (
    *("rotary_dim", "window_rope_theta", "gelu", "output_norms", "norm_offset", "scale_embedding"),
    *("short_factors", "long_factors", "expert_profile"),
)


def fingerprint(directory: Path) -> str:
    """Returns the SHA-256 over family, configuration and every stored weight: name, dtype, shape and bytes. It does not depend on
    the files' number or location. Takes about a second per gigabyte. Raises UserError as `load_model` does."""
    family, config = read_config(directory)
    settings = {name: value for name, value in config.to_dict().items() if value or name not in _LATER}
    if (scaling := settings["rope_scaling"]) is not None:
        settings["rope_scaling"] = {name: value for name, value in scaling.items() if value or name not in _LATER}
    digest = hashlib.sha256(json.dumps([family.MODEL_TYPE, settings], sort_keys=True).encode())
    shards = open_tensors(directory)
    for name in sorted(shards.files):
        digest.update(f"{name} {shards.dtype_name(name)} {shards.shapes[name]}".encode())
        digest.update(shards.read(name).reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
