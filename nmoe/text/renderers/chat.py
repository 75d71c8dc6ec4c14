"""The chat template of a tokenizer (Jinja, as Hugging Face checkpoints have) as a renderer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nmoe.errors import UserError
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.conversation import END_THINK, THINK, ChatMessage, FunctionCall, split_reasoning
from nmoe.text.renderers.base import Messages, Rendered, Tools
from nmoe.text.tokenizer import Tokenizer

Pieces = Sequence[tuple[list[int], int | None]]
"""Ids, and the index of the message that samples them, None for what is read."""


class ChatRenderer:
    """The tokenizer's chat template (`nmoe.text.chat`)."""

    name = "chat"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)

    def supervise(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        taken = [self._as_template_takes(message) for message in messages]
        learned = {
            index
            for index, message in enumerate(messages)
            if message.role == "assistant" and message.trained and index >= first
        }
        pieces = self._template.conversation(taken, tools)
        for index, message in enumerate(messages):
            # Without the call, what is learned is to say nothing.
            if _is_piece(pieces, index) and any(call.name not in self._text(pieces, index) for call in message.calls):
                raise UserError(
                    f"messages[{index}] calls tools, and the chat template does not write it; use a template that does, or "
                    "leave the record out"
                )
        alone: list[Rendered] = []
        for index in sorted(learned):
            if self._says(messages[index], pieces, index):
                continue
            # What the template writes like this only while the turn is the last is learned while it is.
            until = self._template.conversation(taken[: index + 1], tools)
            there = _is_piece(pieces, index)
            if self._says(messages[index], until, index) or (not there and _is_piece(until, index)):
                alone.append(_joined(until, {index}))
                learned.remove(index)
            elif not there:
                raise UserError(
                    f"messages[{index}] is the assistant's, and the chat template does not open its turn there as it does when the "
                    "turn is asked for; leave the message out, or give it weight 0"
                )
        whole = _joined(pieces, learned)
        return [*alone, whole] if whole.learned else alone

    @cached_property
    def _reads_reasoning(self) -> bool:
        """Whether the template writes reasoning that has a field of its own."""
        probe = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!", "reasoning_content": "because"},
        ]
        ids = [token_id for piece, _ in self._template.conversation(probe) for token_id in piece]
        return "because" in self._tokenizer.decode(ids)

    def _says(self, message: ChatMessage, pieces: Pieces, index: int) -> bool:
        """Whether the message is a turn among the pieces, with its reasoning where it has some."""
        reasoning = (split_reasoning(message)[0] or "").strip()
        return _is_piece(pieces, index) and (not reasoning or reasoning in self._text(pieces, index))

    def _text(self, pieces: Pieces, index: int) -> str:
        """What a message's turn says among the pieces."""
        return self._tokenizer.decode([token_id for piece, of in pieces if of == index for token_id in piece])

    def _as_template_takes(self, message: ChatMessage) -> dict[str, Any]:
        content, reasoning = message.content, message.reasoning
        taken: dict[str, Any] = {"role": message.role, "content": content}
        if reasoning is not None and self._reads_reasoning:
            taken["reasoning_content"] = reasoning
        elif reasoning is not None:
            taken["content"] = f"{THINK}\n{reasoning}\n{END_THINK}\n\n{content}"
        if message.calls:
            taken["tool_calls"] = [_as_function_call(call) for call in message.calls]
        for key, value in (("name", message.name), ("tool_call_id", message.call_id)):
            if value is not None:
                taken[key] = value
        return taken


def _is_piece(pieces: Pieces, index: int) -> bool:
    return any(of == index for _, of in pieces)


def _joined(pieces: Pieces, learned: set[int]) -> Rendered:
    sequence = Rendered()
    for ids, index in pieces:
        sequence.learn(ids, index in learned)
    return sequence


def _as_function_call(call: FunctionCall) -> dict[str, Any]:
    """Templates write arguments as JSON, so that those which come as JSON already would be written twice over."""
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, Mapping) else arguments
    taken: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return taken if call.call_id is None else {"id": call.call_id} | taken
