"""Harmony conversations as token ids: rendering histories, prompts and completions, and parsing them back.

Text reaches the ids only through `encode`, which never yields a control token, so that no problem, tool answer or model
output can forge one; structure is read back from control token ids alone. Follows the reference implementation,
https://github.com/openai/harmony, and is tested against it on the o200k_harmony vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nmoe.text.harmony_distance import HarmonyDistance
from nmoe.text.harmony_format import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    CONTROL_TOKENS,
    END,
    MESSAGE,
    RETURN,
    START,
    HarmonyError,
    HarmonyTokenizer,
    check_message,
    write_author,
)
from nmoe.text.harmony_parser import HarmonyParser
from nmoe.text.incremental import IncrementalDecoder
from nmoe.types import Message

_SPELLED = re.compile(f"({'|'.join(map(re.escape, CONTROL_TOKENS))})")

__all__ = ["Completion", "Event", "Harmony", "HarmonyError", "HarmonyTokenizer", "Message", "StreamParser"]


@dataclass(frozen=True)
class Completion:
    """A parsed turn.

        Completion(messages=(Message("assistant", "2+2=4", channel="analysis"), Message("assistant", "4", channel="final")),
                   end="return", error=None)

    `messages` are the well-formed ones, in order, up to the first error. `end` is "return", "call", or None when the tokens
    ran out or broke the format. `error` is None for a well-formed turn, otherwise `token INDEX: reason`. For a turn that only
    ran out of tokens the reason starts with "truncated".
    """

    messages: tuple[Message, ...]
    end: str | None
    error: str | None

    @property
    def final(self) -> str | None:
        """The answer: the content of the last message on the channel `final`; None if there is none."""
        return next((message.content for message in reversed(self.messages) if message.channel == "final"), None)

    @property
    def analysis(self) -> str | None:
        """The contents of all messages on the channel `analysis`, joined by newlines; None if there is none."""
        thoughts = [message.content for message in self.messages if message.channel == "analysis"]
        return "\n".join(thoughts) if thoughts else None


class Harmony:
    """Renders and parses conversations with one tokenizer.

    Raises `UserError` when the tokenizer lacks a control token. `stop_ids` are <|return|> and <|call|>: what ends
    sampling, and belongs to the sample.
    """

    def __init__(self, tokenizer: HarmonyTokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids = {token: tokenizer.special_id(token) for token in CONTROL_TOKENS}
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        self._assistant_start = [self._ids[START], *tokenizer.encode("assistant")]
        self.stop_ids: tuple[int, ...] = (self._ids[RETURN], self._ids[CALL])

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Renders a history: each message ends in <|end|>, a tool call in <|call|>. Raises HarmonyError."""
        ids: list[int] = []
        for message in messages:
            ids += self._render(message, CALL if message.is_call else END)
        return ids

    def render_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Renders the history followed by <|start|>assistant, from which sampling continues. Raises HarmonyError."""
        return self.render(messages) + self._assistant_start

    def render_completion(self, messages: Sequence[Message]) -> list[int]:
        """Renders a turn as the assistant samples it: without the first <|start|>assistant, ending in <|return|> or <|call|>.

        Raises HarmonyError for what cannot be sampled in one turn: no message, another role, a message without a channel or
        with a name, or a tool call before the last message.
        """
        if not messages:
            raise HarmonyError("a completion has at least one message")
        for message in messages:
            if message.role != "assistant" or message.channel is None or message.name is not None:
                raise HarmonyError(f"a completion has unnamed assistant messages, each on a channel, not {message!r}")
        *earlier, last = messages
        for message in earlier:
            if message.is_call:
                raise HarmonyError(f"a tool call ends the turn, but more follows {message!r}")
        ids = self.render(earlier) + self._render(last, CALL if last.is_call else RETURN)
        return ids[len(self._assistant_start) :]

    def parse(self, ids: Sequence[int]) -> list[Message]:
        """Parses a history; the inverse of `render`. A last <|return|> is read like <|end|>.

        Content that is not UTF-8 is decoded with U+FFFD. Raises HarmonyError with the index of the offending token.
        """
        parser = self.parser()
        for token_id in ids:
            parser.feed(token_id)
        parser.finish()
        return parser.messages

    def parse_completion(self, ids: Sequence[int]) -> Completion:
        """Parses the tokens sampled after `render_prompt`; total: any integers give a result.

        A model can sample half a character: it is decoded as U+FFFD, which is no error. An id outside the vocabulary is an
        error.
        """
        parser = self.parser(completion=True)
        try:
            for token_id in ids:
                parser.feed(token_id)
            parser.finish()
        except HarmonyError as error:
            return Completion(tuple(parser.messages), None, str(error))
        return Completion(tuple(parser.messages), parser.end, None)

    def parser(self, *, completion: bool = False) -> HarmonyParser:
        """A fresh state machine over this tokenizer."""
        return HarmonyParser(self.tokenizer, self._tokens, completion=completion)

    def spelled(self, text: str) -> list[int]:
        """The tokens of a text that spells its control tokens, "<|channel|>final". Text from elsewhere could forge them."""
        ids: list[int] = []
        for piece in _SPELLED.split(text):
            ids += [self._ids[piece]] if piece in self._ids else self.tokenizer.encode(piece)
        return ids

    def distance(self) -> HarmonyDistance:
        """Measures how far completions are from a well-formed answer."""
        return HarmonyDistance(self.tokenizer, self._tokens)

    def _render(self, message: Message, closing: str) -> list[int]:
        check_message(message)
        encode = self.tokenizer.encode
        to = "" if message.recipient is None else f" to={message.recipient}"
        before_channel, after_channel = ("", to) if message.channel == "commentary" else (to, "")
        ids = [self._ids[START], *encode(write_author(message)), *encode(before_channel)]
        if message.channel is not None:
            ids += [self._ids[CHANNEL], *encode(message.channel + after_channel)]
        if message.content_type is not None:
            ids += [*encode(" "), self._ids[CONSTRAIN], *encode(message.content_type)]
        return [*ids, self._ids[MESSAGE], *encode(message.content), self._ids[closing]]


@dataclass(frozen=True)
class Event:
    """The effect of one token of a streamed completion.

    "header":   `message` has author, channel, recipient and content type; its content is still empty
    "content":  `text` continues the content
    "message":  `message` is complete; `text` is the rest of its content that was held back, usually ""
    "error":    `text` says why the completion is malformed; nothing follows
    """

    kind: Literal["header", "content", "message", "error"]
    text: str = ""
    message: Message | None = None


class StreamParser:
    """Parses a completion while it is sampled.

    The texts of one message's events, joined, are its content. A character whose bytes are not complete yet is held back.
    """

    def __init__(self, harmony: Harmony) -> None:
        self._parser = harmony.parser(completion=True)
        self._content = IncrementalDecoder(harmony.tokenizer.decode)
        self._error: str | None = None

    def feed(self, token_id: int) -> Event | None:
        """The event that the next sampled token brings; None inside a header, a character, or after an error."""
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

    def completion(self) -> Completion:
        """Returns what `parse_completion` gives for the tokens fed so far."""
        error = self._error
        if error is None:
            try:
                self._parser.finish()
            except HarmonyError as unfinished:
                error = str(unfinished)
        return Completion(tuple(self._parser.messages), self._parser.end if error is None else None, error)
