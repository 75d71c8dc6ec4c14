"""Gives a tokenizer the control tokens of Harmony: ids in reserve are renamed, and the other tokens come after its last id.

No text changes its tokens: what is renamed stands for no text, and control tokens are never found in text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.text.harmony_format import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    CONTROL_TOKENS,
    END,
    END_OF_TEXT,
    MESSAGE,
    RETURN,
    START,
)
from nmoe.text.tokenizer import Tokenizer

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


@dataclass(frozen=True)
class ControlToken:
    """A control token that the tokenizer was given: `ControlToken("<|return|>", 49154, None, "<|im_end|>", 2)`.

    `renamed` is the name that the id had before, None for an id that had none. `like` and `like_id` are the token that means the
    like.
    """

    name: str
    id: int
    renamed: str | None
    like: str | None
    like_id: int | None


@dataclass(frozen=True)
class Harmonized:
    """The files of a tokenizer with Harmony's control tokens, by name, and the tokens that are new in it."""

    files: Mapping[str, str]
    added: tuple[ControlToken, ...]


def harmonized(tokenizer: Tokenizer, files: Mapping[str, str]) -> Harmonized:
    """Adds the control tokens that a tokenizer lacks to its `files`, as `Tokenizer.save` writes them, and makes them its default:
    a turn ends in <|return|>, and the chat template writes Harmony.

    Raises UserError for a tokenizer that has them all.
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
    """Renames a token in the model's vocabulary if it stands there, too: a mapping, or a list of pieces with scores."""
    vocabulary = definition["model"].get("vocab")
    if isinstance(vocabulary, dict) and before in vocabulary:
        vocabulary[name] = vocabulary.pop(before)
    elif isinstance(vocabulary, list):
        definition["model"]["vocab"] = [
            [name, score] if piece == before else [piece, score] for piece, score in vocabulary
        ]


def _like(tokenizer: Tokenizer, name: str) -> tuple[str | None, int | None]:
    """The token that means the like of a control token, with its id."""
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
