"""Conversations as datasets and chat clients have them, and the question that a conversation asks.

Messages have reasoning and calls of tools. Questions have one form in which they are compared: to hold records out, to find
evaluated problems in training data, and to drop duplicates.

A question is the user's words, without the system message, template or format around them. Unicode's compatible forms (NFKC), case
and white space do not count: `Add  1 + 1` and `add １ + 1` are one question.

Generated problems are split by the text that their generator writes (`nmoe.envs.pools.pool.split_by`), which has one form.
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
"""The tags of reasoning and calls, which the assistant's own words may contain."""


@dataclass(frozen=True)
class FunctionCall:
    """One call: `FunctionCall("square", {"x": 2}, "call_1")`. Arguments are an object, or the text that a model wrote for one."""

    name: str
    arguments: Mapping[str, Any] | str
    call_id: str | None = None


@dataclass(frozen=True)
class ChatMessage:
    """One message of a record.

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
        """Whether it has no text, no reasoning and no call."""
        return not (self.content.strip() or (self.reasoning or "").strip() or self.calls)


@dataclass(frozen=True)
class ToolDefinition:
    """Worked example:

        ToolDefinition("square", "Squares a number.",
                       {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]})

    `parameters` describes an object; None if there are none.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] | None

    def as_function(self) -> dict[str, Any]:
        """The form that chat templates take: `{"type": "function", "function": {...}}`."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def split_reasoning(message: ChatMessage) -> tuple[str | None, str]:
    """Splits a message into reasoning and content. The reasoning has its own field, or stands between tags at the start of
    the content.
    """
    if message.reasoning is not None or message.role != "assistant":
        return message.reasoning, message.content
    head, closed, rest = message.content.partition(END_THINK)
    if not closed or not head.lstrip().startswith(THINK):
        return None, message.content
    return head.lstrip().removeprefix(THINK), rest.lstrip("\n")


class Said(Protocol):
    """A message of a conversation."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


def question_key(question: str) -> str:
    """A question in the form in which it is compared with others."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def conversation_key(messages: Sequence[Said]) -> str:
    """The question of a conversation, as it is compared: the user's turns or, without any, all messages."""
    turns = [message.content for message in messages if message.role == "user"]
    return "\x1e".join(map(question_key, turns or [message.content for message in messages]))


def digest_of(key: str) -> bytes:
    """16 bytes for a key, because a million long questions would not fit in memory."""
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()
