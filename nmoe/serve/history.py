"""The messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from nmoe.text.calls.pieces import Piece
from nmoe.text.conversation import ChatMessage, FunctionCall


class History:
    """The messages of a conversation so far: the system message, then exchanges, each a question and all that follows it."""

    def __init__(self, system: str = "") -> None:
        self._start = [ChatMessage("system", system)] if system else []
        self._messages: list[ChatMessage] = []

    @property
    def messages(self) -> Sequence[ChatMessage]:
        return [*self._start, *self._messages]

    @property
    def answered(self) -> bool:
        """Whether there is any text, call or tool's answer after the last question."""
        return any(message.content.strip() or message.calls for message in self._messages[self._questions()[-1] + 1 :])

    def ask(self, text: str) -> None:
        """Adds a question. Earlier answers lose their reasoning, as in environments and most templates; calls and the tools'
        answers stay."""
        self._messages = [replace(message, reasoning=None) for message in self._messages]
        self._messages.append(ChatMessage("user", text))

    def add(self, message: ChatMessage) -> None:
        """Adds a message of the assistant's or a tool's answer."""
        self._messages.append(message)

    def drop_calls(self) -> None:
        """Removes the calls of the last message, which no tool answers."""
        self._messages[-1] = replace(self._messages[-1], calls=())

    def take_back(self) -> None:
        """Removes the last question and all that follows it."""
        del self._messages[self._questions()[-1] :]

    def forget_oldest(self) -> bool:
        """Removes the oldest exchange, and returns True; False if there is only one."""
        for first, second in pairwise(self._questions()):
            del self._messages[first:second]
            return True
        return False

    def start_again(self) -> None:
        """Removes all messages except the system message."""
        self._messages.clear()

    def _questions(self) -> list[int]:
        return [index for index, message in enumerate(self._messages) if message.role == "user"]


class Answer:
    """A message of the assistant's while its pieces arrive. `prefix` begins the ids of its calls."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._texts = {"reasoning": "", "content": ""}
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, piece: Piece) -> None:
        if piece.kind == "call":
            self._calls.append((piece.name or "", []))
        elif piece.kind == "arguments":
            self._calls[-1][1].append(piece.text)
        else:
            self._texts[piece.kind] += piece.text

    def message(self) -> ChatMessage:
        calls = tuple(
            FunctionCall(name, "".join(parts) or "{}", f"{self._prefix}{number}")
            for number, (name, parts) in enumerate(self._calls)
        )
        return ChatMessage("assistant", self._texts["content"], self._texts["reasoning"] or None, calls)
