"""Log-probabilities of tokens in the two forms of OpenAI's API: raw ones, of the model's own distribution."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from nmoe.engine.api import RawLogprob
from nmoe.serve.openai.names import TokenNames

LEAST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON cannot say."""

Scored = tuple[int, RawLogprob | None]
"""A token with its log-probability; the first token of a prompt has none."""

_Utf8 = getincrementaldecoder("utf-8")


def chat_entries(
    names: TokenNames, tokens: Iterable[tuple[int, RawLogprob]], with_ids: bool, ids_as_tokens: bool
) -> str:
    """Returns the list `logprobs.content` of sampled tokens as JSON."""

    def entry(token_id: int, logprob: float) -> str:
        shown = f'"token_id":{token_id},' if with_ids else ""
        named = f'"token":"token_id:{token_id}","bytes":null,"logprob":' if ids_as_tokens else names.entry(token_id)
        return f"{shown}{named}{max(logprob, LEAST)!r}"

    def whole(token_id: int, raw: RawLogprob) -> str:
        top = ",".join(f"{{{entry(*alternative)}}}" for alternative in raw.top)
        return f'{{{entry(token_id, raw.logprob)},"top_logprobs":[{top}]}}'

    return f"[{','.join(whole(*one) for one in tokens)}]"


class TextLogprobs:
    """Writes the table `logprobs` of a completion, part by part: tokens, their log-probabilities and alternatives, and where in the
    text each begins. Tokens in `silent` have no text."""

    def __init__(self, names: TokenNames, silent: Collection[int], ids_as_tokens: bool) -> None:
        self._names, self._silent, self._ids_as_tokens = names, silent, ids_as_tokens
        self._decoder, self._characters = _Utf8("replace"), 0

    def prompt(self, tokens: Sequence[Scored], text_from: int, text: str) -> dict[str, Any]:
        """Returns the table of a prompt, whose text begins with token `text_from`."""
        table = self._table(tokens)
        ids = [token for token, _ in tokens[text_from:]]
        offsets, at = [0] * text_from, 0
        for token in ids:
            offsets.append(at)
            part = self._decoder.decode(self._names.bytes_of(token))
            # SentencePiece puts a space before a text, and before the text behind a control token.
            at += len(part) - (part.startswith(" ") and not text.startswith(" ", at))
        table["text_offset"] = offsets
        # Sampled text never completes a character that the prompt breaks off.
        self._decoder.reset()
        self._characters = len(text)
        return table

    def sampled(self, tokens: Sequence[Scored]) -> dict[str, Any]:
        """Returns the table of the next sampled tokens."""
        table = self._table(tokens)
        table["text_offset"] = [
            self._characters if token in self._silent else self._offset(token) for token, _ in tokens
        ]
        return table

    def _table(self, tokens: Sequence[Scored]) -> dict[str, Any]:
        return {
            "tokens": [self._name(token) for token, _ in tokens],
            "token_logprobs": [None if raw is None else max(raw.logprob, LEAST) for _, raw in tokens],
            "top_logprobs": [None if raw is None else self._top(token, raw) for token, raw in tokens],
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._ids_as_tokens else self._names.name(token)

    def _top(self, token: int, raw: RawLogprob) -> dict[str, float]:
        """Returns the likeliest tokens, with the token itself where it is none of them."""
        top = {self._name(one): max(logprob, LEAST) for one, logprob in raw.top}
        return top | {self._name(token): max(raw.logprob, LEAST)}

    def _offset(self, token: int) -> int:
        before = self._characters
        self._characters += len(self._decoder.decode(self._names.bytes_of(token)))
        return before


def joined(tables: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Returns the table of all parts."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [one for table in tables for one in table[name]] for name in names}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


# Made once: `json.dumps` makes an encoder each time that it is given separators.
dumps = json.JSONEncoder(separators=(",", ":")).encode

quoted = json.encoder.encode_basestring_ascii
"""Returns a text as JSON, as `dumps` writes it after a look at its type."""


def listed(token_ids: Iterable[int]) -> str:
    """Returns token ids as JSON, as `dumps` writes them, in a third of its time."""
    return f"[{','.join(map(str, token_ids))}]"
