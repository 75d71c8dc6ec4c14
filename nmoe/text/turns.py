"""The format of a chat: renders whole conversations with tools as prompts, and reads turns while they are sampled.

>>> form = chat_format(tokenizer)
>>> prompt = form.prompt_ids([ChatMessage("user", "1 + 2?")], [add])
>>> reader = form.reader(prompt, [add])
>>> pieces = [*reader.feed(sampled), *reader.end("stop")]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nmoe.errors import UserError
from nmoe.text.calls.pieces import Piece, TurnReader
from nmoe.text.conversation import ChatMessage, ToolDefinition
from nmoe.text.renderers import (
    RENDERERS,
    ChatRenderer,
    HarmonyRenderer,
    PlainRenderer,
    ReasoningEffort,
    RenderFormat,
    natural_format,
)
from nmoe.text.tokenizer import Tokenizer

__all__ = ["ChatFormat", "Piece", "TurnReader", "chat_format"]


class ChatFormat:
    """A format of conversations. `name` is "harmony", "text", or for a chat template the family that its calls have: "hermes",
    "llama3", "deepseek", "mistral" or "glm". `stop_ids` end a turn. `has_reasoning` says whether turns can have reasoning."""

    def __init__(self, tokenizer: Tokenizer, renderer: ChatRenderer | HarmonyRenderer | PlainRenderer) -> None:
        self._tokenizer, self._renderer = tokenizer, renderer
        self.name: str = renderer.family if isinstance(renderer, ChatRenderer) else renderer.name
        self.stop_ids = renderer.stop_ids
        self.has_reasoning = renderer.has_reasoning and not isinstance(renderer, PlainRenderer)

    def prompt_ids(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition] = (),
        effort: ReasoningEffort | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Renders a conversation, the tools declared beside it, and the start of the assistant's turn. `effort` asks for more or
        less reasoning; `arguments` are variables of the chat template. No text becomes a control token. Raises UserError for what
        the format cannot express."""
        renderer = self._renderer
        if isinstance(renderer, ChatRenderer):
            if effort is not None or arguments:
                renderer = ChatRenderer(self._tokenizer, (), effort, arguments)
        elif arguments:
            raise UserError(
                f"chat_template_kwargs are for a chat template, and the format is {self.name}; leave them out"
            )
        elif isinstance(renderer, HarmonyRenderer) and effort is not None:
            renderer = HarmonyRenderer(self._tokenizer, (), effort)
        elif effort is not None:
            raise UserError('format = "text" knows no reasoning_effort; leave it out')
        return renderer.chat_ids(tuple(messages), tuple(tools))

    def reader(self, prompt_ids: Sequence[int], tools: Sequence[ToolDefinition] = ()) -> TurnReader:
        """Returns a reader for the turn that is sampled after a prompt. Without tools, no calls are read in a chat template's
        turn."""
        return self._renderer.reader(prompt_ids, tuple(tools))


def chat_format(tokenizer: Tokenizer, form: RenderFormat = "auto") -> ChatFormat:
    """Returns the format of a tokenizer's chats: its own for "auto", plain text if it has none. Raises UserError if it lacks the
    tokens or the template that a named format needs."""
    return ChatFormat(tokenizer, RENDERERS[natural_format(tokenizer) or "text" if form == "auto" else form](tokenizer))
