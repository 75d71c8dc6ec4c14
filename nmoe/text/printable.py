"""Shows text and tokens safely on a terminal, whoever wrote them (a model, or the author of a dataset)."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `nmoe runs list` starts without the library of tokenizers
    from nmoe.text.tokenizer import Tokenizer

# A terminal obeys control characters (Cc), str.splitlines breaks at Zl and Zp, and surrogates (Cs) cannot be encoded.
_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
# Characters that reverse the direction of later text, too: `\u202e` shows "dlrow" as "world".
_DIRECTIONS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})

# Of the columns; the index and the name of the row stand in front.
_WIDTH = 98


def printable(text: str) -> str:
    r"""Escapes the control and direction characters that a terminal obeys, except line breaks and tabs: `\x1b[2J` would clear it.
    Joiners of letters and of emoji are text."""
    return "".join(_escape(one) if _is_obeyed(one) else one for one in text)


def _is_obeyed(character: str) -> bool:
    if character in "\n\t":
        return False
    return unicodedata.category(character) in _CATEGORIES or unicodedata.bidirectional(character) in _DIRECTIONS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def token_table(ids: Sequence[int], mask: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the lines of a table with a column per token (text above id above mask), broken into rows that fit a terminal, with
    the index of the row's first token in front."""
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
            number = str(first) if row == 0 else ""
            cells = " ".join(columns[at][row].rjust(widths[at]) for at in range(first, end))
            yield f"{number:>5} {label:<5}{cells}"
        first = end


def _visible(text: str) -> str:
    """Returns a token's text with visible signs for white space."""
    return printable(text).replace(" ", "·").replace("\n", "\\n").replace("\t", "\\t")
