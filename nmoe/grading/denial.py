"""Removes from a message the things that it only names to rule them out: "not 5", "anything but 5", "5 is wrong"."""

from __future__ import annotations

import re

# A number, matched in one way alone, so that a long row of digits takes no longer than others.
WHOLE_NUMBER = r"(?<![\d.,])-?\d[\d,]*+(?:\.\d++)?+"
_NOT = r"(?:(?:\bnot\b|n['’]t\b|\bnever\b|\bexcept\b|\b(?:all|any\w*|every\w*|no\w*) but\b)\W+|(?:≠|!=)\s*)"
_IS_NOT = (
    r"[\"'”’*)]*\s+(?:(?:is|are|was|were)\s+(?:wrong|incorrect|false|not\s+(?:the|an?|my|it|right|correct)\b)"
    r"|(?:is|are|was|were)n['’]t\s+(?:the|an?|my|it|right|correct)\b)[^.,:;\n]*"
)


def without_denied(text: str, thing: str = WHOLE_NUMBER) -> str:
    """Returns a message without the things that it rules out. `thing` is the expression of one, by default a number.

    >>> without_denied("The answer is not 5.")
    'The answer is  .'
    """
    return re.sub(f"{_NOT}(?:{thing})|(?:{thing}){_IS_NOT}", " ", text, flags=re.IGNORECASE)
