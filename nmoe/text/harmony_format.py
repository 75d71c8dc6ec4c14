"""The words of Harmony: control tokens, roles, channels, the message record, and a message's header as text.

Format: https://github.com/openai/harmony (docs/format.md). One message reads

    <|start|>AUTHOR[ to=RECIPIENT][<|channel|>CHANNEL[ to=RECIPIENT]][ <|constrain|>TYPE]<|message|>CONTENT<|end|>

and is written with the recipient after the channel when that is `commentary`, before it otherwise. AUTHOR is a role,
`role:name`, or, for a tool's answer, the tool's name alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

# A tool is written by its name alone, so only these stand before a colon.
_NAMED_ROLES = ("system", "developer", "user", "assistant")


class HarmonyError(UserError):
    """A conversation that is not Harmony. `position` is the index of the token at fault; None when rendering."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason if position is None else f"token {position}: {reason}")
        self.position = position


class HarmonyTokenizer(Protocol):
    """What Harmony needs of a tokenizer; `nmoe.text.tokenizer.Tokenizer` is one.

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
    """The text between two control tokens of a header, and the index of its first token."""

    text: str
    position: int


def check_message(message: Message) -> None:
    """Raise HarmonyError where rendering `message` would lose something that parsing cannot bring back."""

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
    """The author as the header spells it: `user`, `user:ada`, or a tool's name."""
    if message.role == "tool":
        assert message.name is not None, "check_message refuses a tool without a name"
        return message.name
    return message.role if message.name is None else f"{message.role}:{message.name}"


def read_header(author: Segment, channel: Segment | None, constrain: Segment | None) -> Message:
    """The message, still without content, whose header has these segments.

    Lenient where the reference parser is, because models write all of these: the recipient may stand before or after
    the channel, a content type may follow it without <|constrain|>, and segments may end in white space. Anything else
    raises HarmonyError with the position of the segment at fault.
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
