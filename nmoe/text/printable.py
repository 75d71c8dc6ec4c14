"""Text that others wrote, a model or the author of a data set, as a terminal may show it."""

import unicodedata

# A terminal obeys control characters (Cc), str.splitlines breaks at Zl and Zp, and surrogates (Cs) cannot be encoded.
_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
# Characters that turn what follows round, beyond their own text: `\u202e` shows "dlrow" as "world".
_DIRECTIONS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def printable(text: str) -> str:
    """The text with escapes in place of what a terminal obeys, but for line breaks and tabs: `\\x1b[2J` would clear it. Joiners of
    letters and of emoji are text."""
    return "".join(_escape(one) if _is_obeyed(one) else one for one in text)


def _is_obeyed(character: str) -> bool:
    if character in "\n\t":
        return False
    return unicodedata.category(character) in _CATEGORIES or unicodedata.bidirectional(character) in _DIRECTIONS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
