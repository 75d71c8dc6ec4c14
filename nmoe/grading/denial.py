"""Removes from a message the things that it only names to rule them out: "not 5", "anything but 5", "5 is wrong"."""

from __future__ import annotations

import re

# A number, matched in one way alone, so that a long row of digits takes no longer than others.
WHOLE_NUMBER = r"(?<![\d.,])-?\d[\d,]*+(?:\.\d++)?+"
_NOT = r"(?:(?:\bnot\b|n['’]t\b|\bnever\b|\bexcept\b|\b(?:all|any\w*|every\w*|no\w*) but\b)\W+|(?:≠|!=)\s*)"
# Nothing after it: "9 is not the answer so it is 7" goes on with another, and "9 is not a prime" rules nothing out.
_NO_ANSWER = (
    r"not\s+(?:right\b|correct\b|it\b|(?:the|my|an?)\s+(?:(?:right|correct|final)\s+)?"
    r"(?:answer|number|result|solution|one|sum|total|difference|product)\b)"
)
_IS_NOT = (
    r"[\"'”’*)]*\s+(?:(?:is|are|was|were)\s+(?:wrong\b|incorrect\b|false\b|" + _NO_ANSWER + r")"
    r"|(?:is|are|was|were)" + _NO_ANSWER.replace(r"not\s+", r"n['’]t\s+") + r")"
)


def without_denied(text: str, thing: str = WHOLE_NUMBER) -> str:
    """Returns a message without the things that it rules out. `thing` is the expression of one, by default a number.

    >>> without_denied("The answer is not 5.")
    'The answer is  .'
    """
    return re.sub(f"{_NOT}(?:{thing})|(?:{thing}){_IS_NOT}", " ", text, flags=re.IGNORECASE)
