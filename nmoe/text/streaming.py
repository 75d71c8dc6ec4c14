"""Reads a completion while it is sampled: turns tokens into text and, for Harmony, into events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nmoe.text.harmony import Completion, Harmony, HarmonyError, HarmonyTokenizer
from nmoe.types import Message

REPLACEMENT = "\ufffd"

# Bytes that never become a character would otherwise be decoded again with every token that follows them.
_LONG_WAIT_TOKENS = 16


class IncrementalDecoder:
    """Decodes tokens to text as they arrive; a character whose bytes are spread over several tokens is held back until the last
    one.

    `decode` has to be a byte-level tokenizer's: it joins the bytes of all ids and reads them as UTF-8, each maximal broken sequence
    as one U+FFFD. Further bytes can therefore change at most the last character of a decoded text, and only a U+FFFD. Where each
    byte of a broken sequence is a U+FFFD, `held_back` is 3, the most bytes of an incomplete character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], held_back: int = 1) -> None:
        self._decode = decode
        self._held_back = held_back
        self._waiting: list[int] = []
        self._given = 0  # characters of decode(waiting) that push has returned already

    def push(self, token_id: int) -> str:
        """Adds a token, and returns the text that is complete now; may be empty."""
        self._waiting.append(token_id)
        text = self._decode(self._waiting)
        if not text.endswith(REPLACEMENT):
            return self._drain(text)
        held = len(text) - max(len(text.rstrip(REPLACEMENT)), len(text) - self._held_back, self._given)
        piece = text[self._given : len(text) - held]
        self._given = len(text) - held
        if len(self._waiting) >= _LONG_WAIT_TOKENS:
            self._forget(text)
        return piece

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Adds several tokens, and returns the text that is complete now: the same as of `push` one by one."""
        if not token_ids:
            return ""
        text = self._decode([*self._waiting, *token_ids])
        if self._given == 0 and REPLACEMENT not in text:
            return self._drain(text)
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """Ends the input: returns the text of the bytes held back, and resets the decoder."""
        return self._drain(self._decode(self._waiting))

    def _drain(self, text: str) -> str:
        piece = text[self._given :]
        self._waiting.clear()
        self._given = 0
        return piece

    def _forget(self, text: str) -> None:
        # A cut inside a character turns it into two or more U+FFFD, so equal text proves that this cut is between two.
        half = len(self._waiting) // 2
        head = self._decode(self._waiting[:half])
        if len(head) <= self._given and head + self._decode(self._waiting[half:]) == text:
            del self._waiting[:half]
            self._given -= len(head)


def decoder_of(tokenizer: HarmonyTokenizer) -> IncrementalDecoder:
    """Returns a decoder for texts inside a turn. Some tokenizers drop a space at the beginning of a decoded text, so that a
    token is put before it; some decode the bytes of an incomplete character one by one."""
    decode = tokenizer.decode
    held_back = 3 if len(decode(tokenizer.encode("\U000f0000")[:-1])) > 1 else 1
    (*_, last) = tokenizer.encode("a b")
    if decode([last, last]) == decode([last]) * 2:
        return IncrementalDecoder(decode, held_back)
    before = len(decode([last]))
    return IncrementalDecoder(lambda ids: decode([last, *ids])[before:], held_back)


@dataclass(frozen=True)
class Event:
    """What one sampled token changes in a Harmony completion.

    "header":   `message` has author, channel, recipient and content type; its content is still empty
    "content":  `text` continues the content
    "message":  `message` is complete; `text` is the rest of its content that was held back, usually ""
    "error":    `text` says why the completion is malformed; nothing follows
    """

    kind: Literal["header", "content", "message", "error"]
    text: str = ""
    message: Message | None = None


class StreamParser:
    """Parses a Harmony completion while it is sampled.

    The texts of one message's events, joined, are its content. A character whose bytes are not complete yet is held back.
    """

    def __init__(self, harmony: Harmony) -> None:
        self._parser = harmony.parser(completion=True)
        self._content = IncrementalDecoder(harmony.tokenizer.decode)
        self._error: str | None = None

    def feed(self, token_id: int) -> Event | None:
        """Adds the next sampled token, and returns its event; None inside a header, inside a character, or after an error."""
        if self._error is not None:
            return None
        header, complete = self._parser.header, len(self._parser.messages)
        try:
            self._parser.feed(token_id)
        except HarmonyError as error:
            self._error = str(error)
            return Event("error", text=self._error)
        if len(self._parser.messages) > complete:
            return Event("message", text=self._content.flush(), message=self._parser.messages[-1])
        if header is None:
            return None if self._parser.header is None else Event("header", message=self._parser.header)
        text = self._content.push(token_id)
        return Event("content", text=text) if text else None

    def flush(self) -> str:
        """Returns the text held back of a message that breaks off."""
        return self._content.flush()

    def completion(self) -> Completion:
        """Returns the same as `parse_completion` for the tokens fed so far."""
        error = self._error
        if error is None:
            try:
                self._parser.finish()
            except HarmonyError as unfinished:
                error = str(unfinished)
        return Completion(tuple(self._parser.messages), self._parser.end if error is None else None, error)
