"""The Harmony state machine: token ids go in one by one, messages come out.

Structure is read from control token ids, never from text. All parsing runs through it: histories, completions, and streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto

from nmoe.text.harmony_format import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    HarmonyError,
    HarmonyTokenizer,
    Segment,
    read_header,
)
from nmoe.types import Message

_CLOSING = {END: "end", RETURN: "return", CALL: "call"}


class _Expect(Enum):
    """What the next token may be part of."""

    START = auto()
    HEADER = auto()
    CONTENT = auto()
    NOTHING = auto()


class HarmonyParser:
    """Reads one history or, with `completion`, what was sampled after <|start|>assistant.

    `messages` holds the messages that are complete, `header` the one whose content is being read (its own content
    empty), `end` how the turn ended ("return", "call" or None). `feed` and `finish` raise
    HarmonyError at the first token that is out of place; after that the parser is not to be fed again.

    In a completion every message is the assistant's, unnamed and on a channel, and <|return|> or <|call|> ends it. A
    history may also end in <|return|> (a prompt with its completion), nowhere else.
    """

    def __init__(
        self, tokenizer: HarmonyTokenizer, control_tokens: Mapping[int, str], *, completion: bool = False
    ) -> None:
        self.messages: list[Message] = []
        self.header: Message | None = None
        self._content_ids: list[int] = []
        self.end: str | None = None
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.vocab_size
        self._control_tokens = control_tokens
        self._completion = completion
        self._position = 0  # index of the token being read
        self._segments: dict[str, Segment] = {}
        self._segment = START  # the control token that opened the segment being read
        self._segment_position = 0
        self._segment_ids: list[int] = []
        # The prompt ended inside the header, after the role: the sampled text goes on from there.
        self._given_author = "assistant" if completion else ""
        self._expect = _Expect.HEADER if completion else _Expect.START

    def feed(self, token_id: int) -> None:
        """Reads the next token. Any int is legal input."""
        control = self._control_tokens.get(token_id)
        if control is None and not 0 <= token_id < self._vocab_size:
            # A padded embedding has rows past the vocabulary; a model can sample one, and it stands for no text.
            raise self._fault(f"id {token_id} is outside the vocabulary of {self._vocab_size}")
        if self._expect is _Expect.CONTENT:
            self._read_content(token_id, control)
        elif self._expect is _Expect.HEADER:
            self._read_header(token_id, control)
        elif self._expect is _Expect.NOTHING:
            raise self._fault(f"{self._describe(token_id)} after the end of the turn")
        elif control == START:
            self._open_segment(START)
            self._expect = _Expect.HEADER
        else:
            raise self._fault(f"expected {START} but found {self._describe(token_id)}")
        self._position += 1

    def finish(self) -> None:
        """Declares that no token follows. Raises HarmonyError when a message, or the last message of a completion, is missing."""
        if self._expect is _Expect.HEADER:
            raise self._fault("truncated inside a message header")
        if self._expect is _Expect.CONTENT:
            raise self._fault("truncated inside message content")
        if self._completion and self.end is None:
            raise self._fault(f"truncated: neither {RETURN} nor {CALL} ends the turn")

    def _read_header(self, token_id: int, control: str | None) -> None:
        if control is None:
            self._segment_ids.append(token_id)
        elif control == MESSAGE:
            self._close_segment()
            self._complete_header()
            self._expect = _Expect.CONTENT
        elif (control == CHANNEL and self._segment == START) or (control == CONSTRAIN and self._segment != CONSTRAIN):
            self._close_segment()
            self._open_segment(control)
        else:
            raise self._fault(f"{control} inside a message header")

    def _read_content(self, token_id: int, control: str | None) -> None:
        if control is None:
            self._content_ids.append(token_id)
        elif control in _CLOSING:
            self._complete_message(control)
        else:
            raise self._fault(f"{control} inside message content")

    def _open_segment(self, control: str) -> None:
        self._segment = control
        self._segment_position = self._position + 1

    def _close_segment(self) -> None:
        text = self._tokenizer.decode(self._segment_ids)
        self._segment_ids.clear()
        if self._segment == START:
            text = self._given_author + text
            self._given_author = ""
        self._segments[self._segment] = Segment(text, self._segment_position)

    def _complete_header(self) -> None:
        author = self._segments[START]
        header = read_header(author, self._segments.get(CHANNEL), self._segments.get(CONSTRAIN))
        self._segments.clear()
        if self._completion:
            if header.role != "assistant" or header.name is not None:
                raise HarmonyError(
                    f"wrong role {author.text!r}: in a completion only 'assistant' speaks", author.position
                )
            if header.channel is None:
                raise self._fault("the assistant's message has no channel")
        self.header = header

    def _complete_message(self, closing: str) -> None:
        assert self.header is not None, "content is read only after its header"
        if self.header.is_call and closing != CALL:
            raise self._fault(f"a message to {self.header.recipient!r} ends in {CALL}, not {closing}")
        if closing == CALL and not self.header.is_call:
            raise self._fault(f"{CALL} ends a message of the assistant that has a recipient; this is none")
        if closing == RETURN and self.header.role != "assistant":
            raise self._fault(f"{RETURN} ends the assistant's turn but this message is by {self.header.role!r}")
        self.messages.append(replace(self.header, content=self._tokenizer.decode(self._content_ids)))
        self.header = None
        self._content_ids.clear()
        if closing == RETURN or (closing == CALL and self._completion):
            self.end = _CLOSING[closing]
            self._expect = _Expect.NOTHING
        else:
            self._expect = _Expect.START

    def _describe(self, token_id: int) -> str:
        return self._control_tokens.get(token_id) or repr(self._tokenizer.decode([token_id]))

    def _fault(self, reason: str) -> HarmonyError:
        return HarmonyError(reason, self._position)
