"""Tokens as a table for people: each with its text, its id and whether it is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nmoe.text.printable import printable
from nmoe.text.tokenizer import Tokenizer

# Of the columns; the index and the name of the row stand in front.
_WIDTH = 98


def token_table(ids: Sequence[int], mask: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields rows of tokens, as many as fit: text above id above mask, with the index of the first token in front."""
    columns = [
        (_visible(tokenizer.decode([token_id])), str(token_id), str(trained))
        for token_id, trained in zip(ids, mask, strict=True)
    ]
    widths = [max(map(len, column)) for column in columns]
    first = 0
    while first < len(columns):
        end, used = first, 0
        while end < len(columns) and (end == first or used + widths[end] + 1 <= _WIDTH):
            used += widths[end] + 1
            end += 1
        for row, label in enumerate(("text", "id", "mask")):
            place = str(first) if row == 0 else ""
            cells = " ".join(columns[at][row].rjust(widths[at]) for at in range(first, end))
            yield f"{place:>5} {label:<5}{cells}"
        first = end


def _visible(text: str) -> str:
    """Returns a token's text with visible white space."""
    return printable(text).replace(" ", "·").replace("\n", "\\n").replace("\t", "\\t")
