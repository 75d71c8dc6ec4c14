"""Gives a checkpoint the control tokens of the Harmony format: `nmoe tokenizer harmonize MODEL`.

In the tokenizer, reserved ids are renamed, and the remaining control tokens come after its last id. No text changes its tokens:
reserved ids stand for no text, and control tokens are never found in text. In the weights, each new token gets a row of the
embedding.
"""

# Shapes: V vocabulary, D width.

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from nmoe.parsing import json_object, json_of
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.storage import whole_directory
from nmoe.text.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    CONTROL_TOKENS,
    END,
    END_OF_TEXT,
    MESSAGE,
    RETURN,
    START,
    Harmony,
)
from nmoe.text.tokenizer import Tokenizer

Embeddings = Literal["like", "mean"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Names that released tokenizers give to ids without a use, such as Llama's <|reserved_special_token_0|> and Gemma's <unused0>.
_RESERVED = re.compile(r"reserved|unused|placeholder|dummy|extra_?(token|id)?_?\d", re.IGNORECASE)

# What each token is like, the first of these that the tokenizer has: a token's name or text, or a role in tokenizer_config.json.
# ChatML has a line break after `assistant`, where Harmony has a channel. A colon ends a heading, as <|message|> ends a header; a
# second line break would be likely right after the first, and a policy would learn a header without a name.
_A_TURNS_END = "a turn's end"
_LIKE: Mapping[str, Sequence[str]] = {
    START: ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "bos_token"),
    END: (_A_TURNS_END,),
    RETURN: (_A_TURNS_END,),
    CHANNEL: ("\n", ":"),
    MESSAGE: ("<|end_header_id|>", ":", "\n"),
    CALL: ("</tool_call>",),
    CONSTRAIN: (),
    END_OF_TEXT: ("<|end_of_text|>", "<eos>", "</s>", "pad_token", "eos_token"),
}

# Messages as nmoe renders them, for transformers and servers. Tools are declared as TypeScript, which is not for a template.
TEMPLATE = """\
{%- if tools %}{{ raise_exception("this template declares no tools") }}{% endif -%}
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {%- if message.tool_calls %}{{ raise_exception("this template writes no tool calls") }}{% endif -%}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content -}}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" -}}
    {%- elif message.role in ("system", "developer", "user") -%}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" -}}
    {%- else -%}
        {{- raise_exception("this template writes no messages by " + message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif -%}
"""


def harmonize(model: Path, out: Path | None = None, embeddings: Embeddings = "like") -> Iterator[str]:
    """Writes a copy of a checkpoint with Harmony's control tokens to `out`, by default models/NAME-harmony; yields a line for each
    token.

    All weights except the rows of the new tokens have the same bits, and so have the logits of all other tokens. With `like`, a new
    row of the embedding, and of an untied output head, is a copy of the row of a token with a similar meaning, or the mean of all
    rows if there is none; with `mean` it is always the mean (Hewitt 2021, Initializing new word embeddings for pretrained language
    models).

    `out` appears under its name only when it is complete. Raises UserError for a tokenizer that has the tokens, an `out` that
    exists, an adapter, a GGUF file, and an embedding that is stored in a quantised form; StorageError for a full disk.
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
    """Returns the tokenizer's files by name, in the Hugging Face form in which `Tokenizer.save` writes them."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save(Path(scratch))
        return {path.name: path.read_text(encoding="utf-8") for path in Path(scratch).iterdir()}


def _rows(source: Path) -> int:
    return read_config(source)[1].vocab_size


def _tables(source: Path, shards: Shards) -> list[str]:
    """Returns the names of the stored tensors that have a row for each token. Raises UserError for one in a quantised form."""
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
    """Writes config.json and generation_config.json with the number of embedding rows, the tokens that end a turn (Harmony's, then
    the earlier ones), and the padding token."""
    after = Tokenizer.load(directory)
    ends = list(dict.fromkeys([*Harmony(after).stop_ids, *before.end_ids]))
    ids: Mapping[str, Any] = {"eos_token_id": ends, "pad_token_id": after.special_id(END_OF_TEXT)}
    config = json_object(source / "config.json")
    config |= {"vocab_size": rows, **{name: ids[name] for name in TOKEN_IDS if name in config and name in ids}}
    generation = {**read_generation(source), **ids}
    for name, settings in (("config.json", config), (GENERATION, generation)):
        (directory / name).write_text(json.dumps(settings, indent=2) + "\n")


@dataclass(frozen=True)
class ControlToken:
    """A control token that was added to a tokenizer: `ControlToken("<|return|>", 49154, None, "<|im_end|>", 2)`.

    `renamed` is the name that a reserved id had before, None for a new id. `like` and `like_id` are a token with a similar meaning,
    None if there is none.
    """

    name: str
    id: int
    renamed: str | None
    like: str | None
    like_id: int | None


@dataclass(frozen=True)
class Harmonized:
    """The files, by name, of a tokenizer with Harmony's control tokens, and the tokens that were added."""

    files: Mapping[str, str]
    added: tuple[ControlToken, ...]


def harmonized(tokenizer: Tokenizer, files: Mapping[str, str]) -> Harmonized:
    """Adds the missing control tokens to a tokenizer's `files` (in the form of `Tokenizer.save`), and makes Harmony its default: a
    turn ends in <|return|>, and the chat template writes Harmony.

    Raises UserError for a tokenizer that has all of Harmony's control tokens.
    """
    lacking = [name for name in CONTROL_TOKENS if not tokenizer.has_special(name)]
    if not lacking:
        raise UserError("its tokenizer has all control tokens of Harmony already; use the model as it is")
    config: dict[str, Any] = json_of(files.get("tokenizer_config.json", "{}"))
    used = "".join([tokenizer.chat_template or "", *tokenizer.named_tokens.values()])
    ends = set(tokenizer.end_ids)
    reserve = sorted(
        (id_, name)
        for name, id_ in tokenizer.added_tokens.items()
        if _RESERVED.search(name) and name not in used and id_ not in ends
    )
    renamed = dict(zip(lacking, reserve, strict=False))
    definition = json_of(files["tokenizer.json"])
    added = []
    free = tokenizer.vocab_size
    for name in lacking:
        id_, before = renamed.get(name, (free, None))
        free += before is None
        if before is not None:
            _rename(definition, before, name)
        entry = {"id": id_, "content": name, "special": True}
        entry |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        definition["added_tokens"] = [
            *(token for token in definition["added_tokens"] if token["id"] != id_),
            entry,
        ]
        added.append(ControlToken(name, id_, before, *_like(tokenizer, name)))
    definition["added_tokens"].sort(key=lambda token: token["id"])
    # Lists of names that would bring a renamed token back as a new one, and another template.
    config = {
        key: value
        for key, value in config.items()
        if key not in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "chat_template")
    }
    config |= {"eos_token": RETURN, "pad_token": END_OF_TEXT}
    return Harmonized(
        {
            "tokenizer.json": json.dumps(definition, ensure_ascii=False, indent=2),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2) + "\n",
            "chat_template.jinja": TEMPLATE,
        },
        tuple(added),
    )


def _rename(definition: dict[str, Any], before: str, name: str) -> None:
    """Renames a token in the vocabulary (a mapping, or a list of pieces with scores), if the token is part of it."""
    vocabulary = definition["model"].get("vocab")
    if isinstance(vocabulary, dict) and before in vocabulary:
        vocabulary[name] = vocabulary.pop(before)
    elif isinstance(vocabulary, list):
        definition["model"]["vocab"] = [
            [name, score] if piece == before else [piece, score] for piece, score in vocabulary
        ]


def _like(tokenizer: Tokenizer, name: str) -> tuple[str | None, int | None]:
    """Returns a token with a similar meaning to a control token, and its id; None for both if there is none."""
    for like in _LIKE[name]:
        if like == _A_TURNS_END:
            # Where there are several, the template's own is the one that stands in conversations.
            written = tokenizer.chat_template or ""
            names = {id_: token for token, id_ in tokenizer.added_tokens.items()}
            ends = sorted(tokenizer.end_ids, key=lambda end: names[end] not in written)
            if ends:
                return names[ends[0]], ends[0]
        elif (token := tokenizer.named_tokens.get(like, like)) in tokenizer.added_tokens:
            return token, tokenizer.special_id(token)
        elif len(ids := tokenizer.encode(like)) == 1:
            return like, ids[0]
    return None, None
