"""Conversations as datasets and chat clients have them, and the normalised question that a conversation asks.

Messages may have reasoning and tool calls. Questions are compared in a normalised form: to hold records out, to find evaluated
problems in training data, and to drop duplicates.

A question is the user's words, without the system message, template or format around them. Unicode's compatible forms (NFKC), case
and white space do not count: `Add  1 + 1` and `add １ + 1` are one question.

Generated problems are split by the text that their generator writes (`nmoe.envs.pools.pool.split_by`), which needs no
normalisation.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
TAGS = (THINK, END_THINK, CALL, END_CALL)
"""The tags around reasoning and tool calls, which only the assistant's own words may contain."""


@dataclass(frozen=True)
class FunctionCall:
    """A tool call in a message: `FunctionCall("square", {"x": 2}, "call_1")`. Arguments are an object, or the text that a model
    wrote for one."""

    name: str
    arguments: Mapping[str, Any] | str
    call_id: str | None = None


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

        ChatMessage("assistant", "", reasoning="Square it.", calls=(FunctionCall("square", {"x": 2}, "call_1"),))
        ChatMessage("tool", "4", name="square", call_id="call_1")

    `channel` is Harmony's, where the data has it. `trained` is false where the data says `"weight": 0`.
    """

    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[FunctionCall, ...] = ()
    name: str | None = None
    call_id: str | None = None
    channel: str | None = None
    trained: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether the message has no text, no reasoning and no call."""
        return not (self.content.strip() or (self.reasoning or "").strip() or self.calls)


@dataclass(frozen=True)
class ToolDefinition:
    """A tool that a model may call:

        ToolDefinition("square", "Squares a number.",
                       {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]})

    `parameters` is a JSON schema of an object; None if the tool has no parameters.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] | None

    def as_function(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it: `{"type": "function", "function": {...}}`."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def split_reasoning(message: ChatMessage) -> tuple[str | None, str]:
    """Splits a message into reasoning (None if it has none) and content. The reasoning is in its own field or, in an assistant's
    message, between think tags at the start of the content."""
    if message.reasoning is not None or message.role != "assistant":
        return message.reasoning, message.content
    head, closed, rest = message.content.partition(END_THINK)
    if not closed or not head.lstrip().startswith(THINK):
        return None, message.content
    return head.lstrip().removeprefix(THINK), rest.lstrip("\n")


class Said(Protocol):
    """The part of a message that makes a question: role and content."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


def question_key(question: str) -> str:
    """Returns a question in the normalised form in which questions are compared."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def conversation_key(messages: Sequence[Said]) -> str:
    """Returns a conversation's question in the form in which questions are compared: the user's turns or, without any, all
    messages."""
    turns = [message.content for message in messages if message.role == "user"]
    return "\x1e".join(map(question_key, turns or [message.content for message in messages]))


def digest_of(key: str) -> bytes:
    """Hashes a question's key to 16 bytes, because a million long questions would not fit in memory."""
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()
