"""The Harmony format of the gpt-oss models: renders conversations and the assistant's turns as token ids, and parses them.

Format: https://github.com/openai/harmony (docs/format.md). One message reads

    <|start|>AUTHOR[ to=RECIPIENT][<|channel|>CHANNEL[ to=RECIPIENT]][ <|constrain|>TYPE]<|message|>CONTENT<|end|>

and is written with the recipient after the channel when that is `commentary`, before it otherwise. AUTHOR is a role, `role:name`,
or, for a tool's answer, only the tool's name.

Text reaches the ids only through `encode`, which never yields a control token, so that no problem, tool answer or model output can
forge one; structure is read back only from control token ids. Tested against the reference implementation on the o200k_harmony
vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NoReturn, Protocol

from nmoe.errors import UserError
from nmoe.types import Message

START = "<|start|>"
END = "<|end|>"
MESSAGE = "<|message|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
RETURN = "<|return|>"
CALL = "<|call|>"
END_OF_TEXT = "<|endoftext|>"

CONTROL_TOKENS = (END_OF_TEXT, START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)

ROLES = ("system", "developer", "user", "assistant", "tool")
CHANNELS = ("analysis", "commentary", "final")

_SPELLED = re.compile(f"({'|'.join(map(re.escape, CONTROL_TOKENS))})")
_CLOSING = {END: "end", RETURN: "return", CALL: "call"}

# A tool is written by its name alone, so only these stand before a colon.
_NAMED_ROLES = ("system", "developer", "user", "assistant")


class HarmonyError(UserError):
    """Raised for a conversation that breaks the Harmony format. `position` is the index of the token at fault; None when
    rendering."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason if position is None else f"token {position}: {reason}")
        self.position = position


class HarmonyTokenizer(Protocol):
    """The methods of a tokenizer that Harmony needs; `nmoe.text.tokenizer.Tokenizer` has them.

    `encode` never yields a control token, `decode` replaces bytes that are not UTF-8 by U+FFFD, and `special_id` raises
    `UserError` when the token is missing. Ids outside [0, vocab_size) are never passed to `decode`.
    """

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def special_id(self, token: str) -> int: ...


@dataclass(frozen=True)
class Segment:
    """The text of one part of a message header (between two control tokens), and the index of its first token."""

    text: str
    position: int


def check_message(message: Message) -> None:
    """Raises HarmonyError if parsing the rendered `message` would not give it back."""

    def refuse(reason: str) -> NoReturn:
        raise HarmonyError(f"cannot render {message!r}: {reason}")

    if message.role not in ROLES:
        refuse(f"unknown role {message.role!r}; the roles are {', '.join(ROLES)}")
    if message.channel is not None and message.channel not in CHANNELS:
        refuse(f"unknown channel {message.channel!r}; the channels are {', '.join(CHANNELS)}")
    for field in ("recipient", "name", "content_type"):
        value = getattr(message, field)
        if value is not None and value.split() != [value]:
            refuse(f"{field} {value!r} must be one word without spaces, or None")
    if message.role == "tool":
        if message.name is None or message.recipient is None:
            refuse("a tool's answer needs the tool's name and a recipient, normally 'assistant'")
        if message.name.partition(":")[0] in _NAMED_ROLES:
            refuse(f"the tool name {message.name!r} would read as a role; rename the tool")


def write_author(message: Message) -> str:
    """Returns the author as the header writes it: `user`, `user:ada`, or a tool's name."""
    if message.role == "tool":
        assert message.name is not None, "check_message refuses a tool without a name"
        return message.name
    return message.role if message.name is None else f"{message.role}:{message.name}"


def read_header(author: Segment, channel: Segment | None, constrain: Segment | None) -> Message:
    """Parses a message header from its parts; returns the message, with empty content.

    Lenient where the reference parser is, because models write all of these: the recipient may stand before or after the channel, a
    content type may follow the recipient without <|constrain|>, and segments may end in white space. Anything else raises
    HarmonyError with the position of the segment at fault.
    """
    author_word, *words = _words(author, "an author")
    rest = [(word, author.position) for word in words]
    channel_word = None
    if channel is not None:
        channel_word, *words = _words(channel, "a channel")
        if channel_word not in CHANNELS:
            raise HarmonyError(f"unknown channel {channel_word!r}", channel.position)
        rest += [(word, channel.position) for word in words]

    recipient = content_type = None
    if rest and rest[0][0].startswith("to=") and rest[0][0] != "to=":
        recipient = rest.pop(0)[0].removeprefix("to=")
        if rest and constrain is None and not rest[0][0].startswith("to="):
            content_type = rest.pop(0)[0]
    if rest:
        raise HarmonyError(f"unexpected {rest[0][0]!r} in the header", rest[0][1])
    if constrain is not None:
        content_type, *words = _words(constrain, "a content type")
        if words:
            raise HarmonyError(f"unexpected {words[0]!r} after the content type", constrain.position)

    role, colon, name = author_word.partition(":")
    if role not in _NAMED_ROLES:
        # The reference takes an unknown word for a tool's name exactly when it addresses someone.
        if recipient is None:
            raise HarmonyError(f"unknown role {author_word!r} (a tool's answer names its recipient)", author.position)
        role, name = "tool", author_word
    elif colon and not name:
        raise HarmonyError(f"the role {role!r} is followed by an empty name", author.position)
    return Message(role, "", channel_word, recipient, name or None, content_type)


def _words(segment: Segment, what: str) -> list[str]:
    words = segment.text.split()
    if not words or segment.text[0].isspace():
        raise HarmonyError(f"the header lacks {what}", segment.position)
    return words


class _Expect(Enum):
    """The parser's state: what the next token may be part of."""

    START = auto()
    HEADER = auto()
    CONTENT = auto()
    NOTHING = auto()


class HarmonyParser:
    """Parses token by token: one history or, with `completion`, the tokens sampled after <|start|>assistant.

    `messages` holds the messages that are complete. `header` is the message whose content is being read, itself without content;
    None between messages. `end` says how the turn ended ("return", "call" or None). `feed` and `finish` raise HarmonyError at the
    first token that breaks the format; after that the parser must not be used.

    In a completion every message is the assistant's, unnamed and on a channel, and <|return|> or <|call|> ends it. A history may
    also end in <|return|> (a prompt with its completion), nowhere else.
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
        """Reads the next token. Any integer is accepted; raises HarmonyError if it breaks the format."""
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
        """Ends the input. Raises HarmonyError if it stops inside a message, or if a completion lacks its <|return|> or <|call|>."""
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


@dataclass(frozen=True)
class Completion:
    """A turn of the assistant, parsed from sampled tokens into messages.

        Completion(messages=(Message("assistant", "2+2=4", channel="analysis"), Message("assistant", "4", channel="final")),
                   end="return", error=None)

    `messages` are the well-formed messages, in order, up to the first error. `end` is "return", "call", or None when the tokens ran
    out or broke the format. `error` is None for a well-formed turn, otherwise `token INDEX: reason`. For a turn that only ran out
    of tokens the reason starts with "truncated".
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
    """Renders and parses conversations in the Harmony format with one tokenizer.

    Raises `UserError` when the tokenizer lacks a control token. `stop_ids` are <|return|> and <|call|>, which end sampling and
    belong to the sample.
    """

    def __init__(self, tokenizer: HarmonyTokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids = {token: tokenizer.special_id(token) for token in CONTROL_TOKENS}
        self.control_tokens = {token_id: token for token, token_id in self._ids.items()}
        self._assistant_start = [self._ids[START], *tokenizer.encode("assistant")]
        self.stop_ids: tuple[int, ...] = (self._ids[RETURN], self._ids[CALL])

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Renders a history: each message ends in <|end|>, a tool call in <|call|>. Raises HarmonyError as `check_message` does."""
        ids: list[int] = []
        for message in messages:
            ids += self._render(message, CALL if message.is_call else END)
        return ids

    def render_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Renders the history followed by <|start|>assistant, from which sampling continues. Raises HarmonyError as `check_message`
        does."""
        return self.render(messages) + self._assistant_start

    def render_completion(self, messages: Sequence[Message]) -> list[int]:
        """Renders a turn as the assistant samples it: without the first <|start|>assistant, ending in <|return|> or <|call|>.

        Raises HarmonyError for messages that cannot be sampled in one turn: no message, another role, a message without a channel
        or with a name, or a tool call before the last message.
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

        Bytes that are not UTF-8 are decoded as U+FFFD. Raises HarmonyError with the index of the offending token.
        """
        parser = self.parser()
        for token_id in ids:
            parser.feed(token_id)
        parser.finish()
        return parser.messages

    def parse_completion(self, ids: Sequence[int]) -> Completion:
        """Parses the tokens sampled after `render_prompt`. Never raises: any integers give a result.

        A model can sample half a character: it is decoded as U+FFFD, which is no error. An id outside the vocabulary is an error.
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
        """Creates a parser for this tokenizer, at its start."""
        return HarmonyParser(self.tokenizer, self.control_tokens, completion=completion)

    def spelled(self, text: str) -> list[int]:
        """Encodes a text in which names of control tokens become these tokens, as in "<|channel|>final". Not for text from
        elsewhere, which could forge them."""
        ids: list[int] = []
        for piece in _SPELLED.split(text):
            ids += [self._ids[piece]] if piece in self._ids else self.tokenizer.encode(piece)
        return ids

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


class _ByteTokenizer:
    """A tokenizer with bytes as ids 0 to 255, and the control tokens after them."""

    vocab_size = 256 + len(CONTROL_TOKENS)

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")

    def special_id(self, token: str) -> int:
        return 256 + CONTROL_TOKENS.index(token)


_TOKENIZER = _ByteTokenizer()
_HARMONY = Harmony(_TOKENIZER)


def read_completion(text: str) -> Completion:
    """Parses a completion given as text with the names of its control tokens. Its start, "<|start|>assistant", and its last
    <|return|> may be missing, because servers omit them."""
    text = text.strip().removeprefix(f"{START}assistant")
    if not text.endswith((RETURN, CALL)):
        text += RETURN
    return _HARMONY.parse_completion(_HARMONY.spelled(text))
