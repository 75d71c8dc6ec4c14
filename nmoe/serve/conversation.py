"""A conversation with a model: its history, rendered as the prompt of the next answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nmoe.errors import UserError
from nmoe.text.renderers import RENDERERS, natural_format
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

ChatFormat = Literal["auto", "harmony", "chat", "text"]

# The share of the context reserved for an answer: a longer history loses its oldest exchanges.
_ANSWERS_SHARE = 0.25


class History:
    """The messages so far. `form` is "harmony", "chat" (the tokenizer's template) or "text"; in the history an answer stands
    without the reasoning before it, as environments show it and templates drop it."""

    def __init__(self, tokenizer: Tokenizer, form: ChatFormat, system: str, context_tokens: int) -> None:
        """`auto` is the form that the tokenizer is made for, or else text. Raises UserError for a tokenizer that has not the form
        asked for."""
        self.form = (natural_format(tokenizer) or "text") if form == "auto" else form
        self._renderer = RENDERERS[self.form](tokenizer)
        self.stop_ids = self._renderer.stop_ids
        self._start = [Message("system", system)] if system else []
        self._context_tokens = context_tokens
        self._exchanges: list[tuple[Message, Message]] = []
        self._asked: Message | None = None

    def ask(self, text: str, max_new_tokens: int) -> tuple[list[int], int]:
        """The prompt that ends in this question, and how many exchanges had to be forgotten to leave room for an answer of
        `max_new_tokens`, or of a quarter of the context where that is less. Raises UserError where the question alone is too
        long."""
        self._asked = Message("user", text)
        wanted = min(max_new_tokens, max(1, int(_ANSWERS_SHARE * self._context_tokens)))
        forgotten = 0
        while True:
            history = [message for exchange in self._exchanges for message in exchange]
            prompt_ids = self._renderer.prompt_ids([*self._start, *history, self._asked])
            if len(prompt_ids) + wanted <= self._context_tokens:
                return prompt_ids, forgotten
            if not self._exchanges:
                break
            del self._exchanges[0]
            forgotten += 1
        if len(prompt_ids) >= self._context_tokens:
            raise UserError(f"{len(prompt_ids)} tokens are more than the context of {self._context_tokens}")
        return prompt_ids, forgotten

    def answered(self, token_ids: Sequence[int]) -> None:
        """Takes what was sampled into the history; an answer that says nothing, or was never given, leaves its question out."""
        assert self._asked is not None, "an answer follows a question"
        _, said = self._renderer.said(token_ids)
        if said.strip():
            self._exchanges.append((self._asked, Message("assistant", said, channel="final")))

    def start_again(self) -> None:
        """Clears the history, except for the system message."""
        self._exchanges.clear()
