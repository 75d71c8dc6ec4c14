"""The pieces that a sampled turn is read as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a turn: text of the answer or of the reasoning, the start of call number `call` of the tool `name`, or text that
    continues its arguments."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str = ""
    call: int | None = None
    name: str | None = None
