"""Export of a run's checkpoint, or of any that nmoe loads, as a Hugging Face checkpoint or a PEFT adapter.
`nmoe export CHECKPOINT DIRECTORY`"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch

from nmoe.errors import UserError
from nmoe.gguf_file import is_gguf
from nmoe.model.checkpoint import export_model, read_config, stored_dtype
from nmoe.model.peft_format import is_adapter, save_adapter
from nmoe.model.policy import base_of, load_policy
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.whole import whole_directory
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
    """Writes a checkpoint for transformers: weights in `dtype` (None: that of the stored model or base), configuration, generation
    settings and the tokenizer's files with the chat template. An adapter is merged into its base or, with the format "peft",
    written by itself.

    `directory` appears under its name only when it is whole. Raises UserError for a directory that is not empty, and as
    `load_policy` and `export_model` do; StorageError for a full disk.
    """
    source = resolve_checkpoint(checkpoint)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: exists and is not an empty directory; name another to export to")
    if format == "peft" and not is_adapter(source):
        raise UserError(f"{source}: a whole model; format peft is that of an adapter, hf is a model's")
    base = base_of(source) if is_adapter(source) else source
    profile, stored = read_config(base)[1].expert_profile, stored_dtype(base)
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


def generation_of(source: Path) -> dict[str, object]:
    """Generation settings of a model that nmoe trained from scratch: it ends its turn as in Harmony, if its tokenizer has the
    tokens, else as the tokenizer says."""
    if not (source / "tokenizer.json").exists():
        return {}
    tokenizer = Tokenizer.load(source)
    if not all(tokenizer.has_special(token) for token in CONTROL_TOKENS):
        return {"eos_token_id": list(tokenizer.end_ids)} if tokenizer.end_ids else {}
    return {"eos_token_id": list(Harmony(tokenizer).stop_ids), "pad_token_id": tokenizer.special_id(END_OF_TEXT)}
