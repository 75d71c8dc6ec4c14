"""Shows a chat in a terminal or a pipe."""

from __future__ import annotations

import sys

from nmoe.text.calls.pieces import Piece
from nmoe.text.printable import printable

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def shown(text: str) -> str:
    """Escapes control characters of a model's text if it is printed to a terminal, which would obey them."""
    return printable(text) if sys.stdout.isatty() else text


class Screen:
    """Prints the pieces of an answer as they come: reasoning dimmed on a terminal and marked in a pipe, calls with their tool's
    name, text as it is."""

    def __init__(self) -> None:
        self._section: str | None = None
        self._terminal = sys.stdout.isatty()

    def show(self, piece: Piece) -> None:
        section = f"call {piece.call}" if piece.call is not None else piece.kind
        if section != self._section:
            self.leave()
            self._section = section
            self._enter(piece)
        print(shown(piece.text), end="", flush=True)

    def show_tool(self, name: str, output: str) -> None:
        """Prints a tool's answer."""
        self.leave()
        output = output.rstrip("\n")
        print(f"{_DIM}{shown(output)}{_PLAIN}" if self._terminal else f"[{shown(name)} answers] {output}", flush=True)

    def end(self) -> None:
        """Ends an answer."""
        if self._section is None:
            print()
        self.leave()

    def _enter(self, piece: Piece) -> None:
        if piece.kind == "call":
            print(f"[{shown(piece.name or '')}] ", end="")
        elif piece.kind == "reasoning":
            print(_DIM if self._terminal else "[reasoning] ", end="")

    def leave(self) -> None:
        """Ends the line of the piece shown last."""
        if self._section is not None:
            print(_PLAIN if self._terminal and self._section == "reasoning" else "", flush=True)
        self._section = None
