"""Decode one token at a time, so that the joined pieces are exactly the text that decoding at once gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

# Bytes that never become a character would otherwise be decoded again with every token that follows them.
_LONG_WAIT_TOKENS = 16


class IncrementalDecoder:
    """Turns tokens into text as they arrive; a character whose bytes are spread over several tokens waits for the last.

    `decode` is that of a byte-level tokenizer: the bytes of all ids joined and read as UTF-8, each maximal broken
    sequence becoming one U+FFFD. Further bytes can therefore change at most the last character of what was decoded, and
    only where that is U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._waiting: list[int] = []
        self._given = 0  # characters of decode(waiting) that push has returned already

    def push(self, token_id: int) -> str:
        """Returns the text that `token_id` completes; may be empty."""
        self._waiting.append(token_id)
        text = self._decode(self._waiting)
        if not text.endswith(REPLACEMENT):
            return self._drain(text)
        piece = text[self._given : -1]
        self._given = len(text) - 1
        if len(self._waiting) >= _LONG_WAIT_TOKENS:
            self._forget(text)
        return piece

    def flush(self) -> str:
        """Returns the text of the bytes still waiting, when nothing follows them, and resets the decoder."""
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
