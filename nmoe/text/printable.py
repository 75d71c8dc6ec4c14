"""Text that others wrote, a model or the author of a data set, as a terminal may show it."""

import unicodedata


def printable(text: str) -> str:
    """The text with line breaks and tabs, and all else that is no visible character or space as an escape: a terminal obeys control
    characters, so that `\\x1b[2J` would clear it."""
    return "".join(
        one if one in "\n\t" or one.isprintable() or unicodedata.category(one) == "Zs" else _escape(one) for one in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
