"""Gives a checkpoint the control tokens of Harmony: `nmoe tokenizer harmonize MODEL`."""

# Shapes: V vocabulary, D width.

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.generation import FILE as GENERATION
from nmoe.generation import TOKEN_IDS, read_generation
from nmoe.gguf_file import is_gguf
from nmoe.model.checkpoint import SHARD_BYTES, read_config
from nmoe.model.families.base import TIED_HEAD
from nmoe.model.peft_format import is_adapter
from nmoe.model.shards import Shards, write_shards
from nmoe.parsing import json_object
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.whole import whole_directory
from nmoe.text.harmonized import ControlToken, Harmonized, harmonized
from nmoe.text.harmony import Harmony
from nmoe.text.harmony_format import END_OF_TEXT
from nmoe.text.tokenizer import Tokenizer

Embeddings = Literal["like", "mean"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def harmonize(model: Path, out: Path | None = None, embeddings: Embeddings = "like") -> Iterator[str]:
    """Writes a checkpoint with Harmony's control tokens to `out`, by default models/NAME-harmony; yields a line for each token.

    All weights but the rows of the new tokens have the same bits, and so have the logits of all other tokens. With `like`, a row of
    the embedding, and of a head that is not tied to it, is that of a token that means the like, and the mean of all rows where no
    token does; with `mean` it is always the mean (Hewitt 2021, Initializing new word embeddings for pretrained language models).

    `out` appears under its name only when it is whole. Raises UserError for a tokenizer that has the tokens, an `out` that exists,
    an adapter, a GGUF file, and an embedding that is stored in a quantised form; StorageError for a full disk.
    """
    source = resolve_checkpoint(model)
    if is_gguf(source):
        raise UserError(f"{source}: a GGUF file; make a checkpoint of it first: nmoe model import {source}")
    if is_adapter(source):
        raise UserError(f"{source}: an adapter; make a whole model of it first: nmoe export {model} DIRECTORY")
    out = Path("models") / f"{model.resolve().name}-harmony" if out is None else out
    if out.exists():
        raise UserError(f"{out}: exists; name another directory with --out")
    tokenizer, shards = Tokenizer.load(source), Shards(source)
    with whole_directory(out, "name another directory with --out") as partial_:
        try:
            given = harmonized(tokenizer, _files(tokenizer))
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
        rows = max(_rows(source), *(token.id + 1 for token in given.added))
        write_shards(partial_, _tensors(source, shards, given.added, rows, embeddings), SHARD_BYTES)
        for name, text in given.files.items():
            (partial_ / name).write_text(text, encoding="utf-8")
        _write_settings(source, partial_, tokenizer, rows)
    yield from _lines(given, embeddings)
    yield f"written to {out}, {rows:,} rows in its embedding; a run takes it as model.path"


def _lines(given: Harmonized, embeddings: Embeddings) -> Iterator[str]:
    for token in given.added:
        where = "a new row" if token.renamed is None else f"was {token.renamed}"
        like = f"as {token.like!r}" if embeddings == "like" and token.like is not None else "the mean of all tokens"
        yield f"{token.name:14} id {token.id}, {where}; embedding: {like}"


def _files(tokenizer: Tokenizer) -> dict[str, str]:
    """The tokenizer's files as it writes them, whatever format it was read from."""
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save(Path(place))
        return {path.name: path.read_text(encoding="utf-8") for path in Path(place).iterdir()}


def _rows(source: Path) -> int:
    return read_config(source)[1].vocab_size


def _tables(source: Path, shards: Shards) -> list[str]:
    """The names of the stored tensors with a row for each token. Raises UserError where one is stored in a quantised form."""
    family, config = read_config(source)
    names = [entry.theirs for entry in family.entries(config) if entry.ours in ("embedding.weight", "head.weight")]
    for name in names:
        if name not in shards.files or shards.dtype(name) not in _FLOATS:
            how = f"as {shards.dtype_name(name)}" if name in shards.files else "in a quantised form"
            raise UserError(
                f"{shards.listing}: {name} is stored {how}, which takes no new rows; write it in bfloat16 first: "
                f"nmoe export {source} DIRECTORY --dtype bfloat16"
            )
    # A copy of the embedding that some files have although the head is tied.
    return [*names, *({TIED_HEAD} & shards.files.keys() - set(names))]


def _tensors(
    source: Path, shards: Shards, added: tuple[ControlToken, ...], rows: int, embeddings: Embeddings
) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
    tables = _tables(source, shards)
    for name in shards.files:
        if name not in tables:
            yield name, shards.nbytes(name), partial(shards.read, name)
            continue
        size = shards.nbytes(name) // shards.shapes[name][0] * rows
        yield name, size, partial(_with_rows, shards, name, added, rows, embeddings)


def _with_rows(shards: Shards, name: str, added: tuple[ControlToken, ...], rows: int, embeddings: Embeddings) -> Tensor:
    table_VD = shards.read(name)
    mean_D = table_VD.double().mean(0).to(table_VD.dtype)
    missing = rows - len(table_VD)
    larger_VD = torch.cat([table_VD, mean_D.expand(missing, -1)]) if missing else table_VD.clone()
    for token in added:
        like = token.like_id if embeddings == "like" else None
        larger_VD[token.id] = mean_D if like is None else table_VD[like]
    return larger_VD


def _write_settings(source: Path, directory: Path, before: Tokenizer, rows: int) -> None:
    """Writes config.json and generation_config.json: the number of rows, the ends of a turn in Harmony, then those that there were
    before, and the token to pad with."""
    after = Tokenizer.load(directory)
    ends = list(dict.fromkeys([*Harmony(after).stop_ids, *before.end_ids]))
    ids: Mapping[str, Any] = {"eos_token_id": ends, "pad_token_id": after.special_id(END_OF_TEXT)}
    config = json_object(source / "config.json")
    config |= {"vocab_size": rows, **{name: ids[name] for name in TOKEN_IDS if name in config and name in ids}}
    generation = {**read_generation(source), **ids}
    for name, settings in (("config.json", config), (GENERATION, generation)):
        (directory / name).write_text(json.dumps(settings, indent=2) + "\n")
