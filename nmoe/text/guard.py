"""Keeps the content of messages from forging control tokens when a chat template renders it.

A template writes structure and content into one text. Before rendering, the name of every control token inside a content is broken
up by a character, the breaker, that occurs nowhere else. The breaker is removed again, between the control tokens, before the text
is encoded. For honest content the ids are exactly the same as transformers'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from nmoe.errors import UserError
from nmoe.parsing import is_deep
from nmoe.text.conversation import TAGS
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_ROLES = {"developer": "system"}
_WORD = re.compile(r"[\w.-]*")


class ContentGuard:
    """Breaks up the names of a tokenizer's control tokens in content before a template renders it, and encodes the rendered
    text."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer, self._template = tokenizer, template
        # A name of one character cannot be broken up, and is never structure.
        added = sorted((name for name in tokenizer.added_tokens if len(name) > 1), key=len, reverse=True)
        self.added = {name: tokenizer.added_tokens[name] for name in added}
        alternatives = "|".join(map(re.escape, added))
        self._split = re.compile(f"({alternatives})")
        self._starts = _starts(added)
        # What the assistant's own words may not hold: all but the tags, which some tokenizers have as control tokens, too.
        self._foreign_starts = _starts([name for name in added if name not in TAGS])

    def messages(self, messages: Sequence[Message], breaker: str) -> list[dict[str, Any]]:
        """Guards the messages of a prompt, and returns them as the dictionaries that templates take."""
        return [self.message({"role": one.role, "content": one.content}, breaker) for one in messages]

    def message(self, message: Mapping[str, Any], breaker: str) -> dict[str, Any]:
        """Guards one message of a dataset. A developer message becomes a system message, because templates know no developer
        role."""
        role, content = message["role"], message.get("content")
        guarded: dict[str, Any] = {"role": _ROLES.get(role, role)}
        guarded |= {key: self.value(value, breaker) for key, value in message.items() if key not in ("role", "content")}
        if "content" in message:
            guarded["content"] = None if content is None else self.text(content, breaker, role == "assistant")
        return guarded

    def value(self, value: Any, breaker: str) -> Any:
        """Guards all texts inside a JSON value except single words, because templates compare names and look at the length of
        ids."""
        if isinstance(value, str):
            return value if _WORD.fullmatch(value) else self.text(value, breaker)
        if isinstance(value, Mapping):
            return {self.value(key, breaker): self.value(one, breaker) for key, one in value.items()}
        return [self.value(one, breaker) for one in value] if isinstance(value, list | tuple) else value

    def text(self, content: str, breaker: str, by_assistant: bool = False) -> str:
        """Returns the content with a breaker inside every token name, and at both ends, where the content could complete a name
        that the template begins. White space at the ends stays outside, because templates trim it. Content that is only white space
        is not changed. If the text is written `by_assistant`, tags of reasoning and calls are not broken up."""
        core = content.strip()
        if not core:
            return content
        left = content[: len(content) - len(content.lstrip())]
        # A tag is no part of another name, and templates cut contents at tags.
        opening = "" if by_assistant and core.startswith(TAGS) else breaker
        closing = "" if by_assistant and core.endswith(TAGS) else breaker
        right = content[len(content.rstrip()) :]
        return (
            left
            + opening
            + breaker.join(_pieces(core, self._foreign_starts if by_assistant else self._starts))
            + closing
            + right
        )

    def encode(self, text: str, breaker: str) -> list[int]:
        """Encodes a rendered text: names of control tokens become control tokens, unless a breaker was put into them."""
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self.added:
                ids.append(self.added[piece])
            else:
                for plain in _pieces(piece.replace(breaker, ""), self._starts):
                    ids += self._tokenizer.encode(plain)
        return ids

    def unused(self, texts: Iterable[str]) -> tuple[str, str]:
        """Returns two characters of Unicode's private-use areas that occur neither in the texts nor in the template. Raises
        UserError if fewer are free."""
        present = set(self._template).union(*texts)
        free = (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in present)
        first, second = next(free, None), next(free, None)
        if first is None or second is None:
            raise UserError(
                "the messages hold all private-use characters of Unicode, of which rendering needs two; leave some out"
            )
        return first, second


def _starts(names: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern that matches at the start of each name, also inside another name."""
    return re.compile(f"(?=(?:{'|'.join(map(re.escape, names))}))" if names else r"(?!)")


def _pieces(text: str, starts: re.Pattern[str]) -> list[str]:
    """Cuts the text after the first character of every token name in it, so that no piece contains a name."""
    cuts = [0, *(match.start() + 1 for match in starts.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]


def strings(value: Any) -> Iterator[str]:
    """Yields all strings inside a JSON value, keys included. Raises UserError if the value is nested too deeply to be guarded."""
    if is_deep(value):
        raise UserError("a tool or the arguments of a call are nested too deeply; flatten them")
    yield from _strings(value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from (*_strings(key), *_strings(one))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)
