"""The pieces that a turn of the assistant is read as."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nmoe.types import FinishReason


@dataclass(slots=True)  # not frozen: that takes four times as long to make, and each streamed token makes one
class Piece:
    """A part of a turn: text of the answer or of the reasoning, the start of call number `call` of the tool `name`, or text that
    continues its arguments."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str = ""
    call: int | None = None
    name: str | None = None


class TurnReader(Protocol):
    """Reads one turn of the assistant while it is sampled. The texts of the pieces, joined for each kind and call, are the same for
    every division of the tokens. Never raises: any ids are read."""

    @property
    def held(self) -> str:
        """The white space at the end of the answer so far, which is held back: it is no text if a tag follows."""

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        """Adds sampled tokens, and returns the pieces that are certain now."""

    def end(self, finish_reason: FinishReason) -> list[Piece]:
        """Ends the turn, and returns the pieces held back."""


class PieceWriter:
    """Collects the pieces of a turn. White space between text and a tag belongs to the form and is left out; elsewhere it is
    text."""

    def __init__(self) -> None:
        self.calls = 0
        self._pieces: list[Piece] = []
        self._blank: dict[Literal["content", "reasoning"], str] = {}
        self._begun: set[str] = set()  # the kinds that have text already
        self._tagged: set[str] = set()  # the kinds with a tag behind their last text

    def say(self, kind: Literal["content", "reasoning"], text: str) -> None:
        """Adds text."""
        text = self._blank.pop(kind, "") + plain(text)
        core = text.rstrip(_SPACE)
        self._blank[kind] = text[len(core) :]
        if not core:
            return
        if kind not in self._begun and kind in self._tagged:
            core = core.lstrip(_SPACE)
        self._pieces.append(Piece(kind, core))
        self._begun.add(kind)
        self._tagged.discard(kind)

    def tag(self) -> None:
        """Marks a tag that was read: white space around it is no text."""
        self._tagged |= {"content", "reasoning"}

    def call(self, name: str) -> None:
        """Opens a call."""
        self._pieces.append(Piece("call", "", self.calls, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Continues the arguments of the call opened last."""
        if text := plain(text):
            self._pieces.append(Piece("arguments", text, self.calls - 1))

    @property
    def held(self) -> str:
        """The white space at the end of the answer that no tag has followed yet."""
        return "" if "content" in self._tagged else self._blank.get("content", "")

    def end(self) -> None:
        """Gives the white space at the end of a turn that no tag follows."""
        for kind in ("reasoning", "content"):
            blank = self._blank.pop(kind, "")
            if blank and kind not in self._tagged:
                self._pieces.append(Piece(kind, blank))

    def taken(self) -> list[Piece]:
        """Returns the pieces since the last time."""
        taken, self._pieces = self._pieces, []
        return taken


_SPACE = " \t\r\n"
_MARKS = re.compile("[\ud800-\udfff]")


def plain(text: str) -> str:
    """Returns the text without the marks that stand for control tokens (`nmoe.text.calls.reader`)."""
    return _MARKS.sub("", text)
