r"""Choices of a question with several: their letters and values, as in "\text{(B)}\ 12" and "Option B"."""

from __future__ import annotations

import re

from nmoe.grading.math.normalization import normalize

# A choice has its own sign around or after its letter, and something between it and its value.
_CHOICE = re.compile(
    r"\s*(?:\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*(?:\(([A-J])\)|([A-J])[.):])\s*\}(?:\s|\\[ ,;:]|\\q?quad|~)*"
    r"|(?:\(([A-J])\)|([A-J])[.):])(?:\s|\\[ ,;:]|\\q?quad|~)+)(?![A-J]\s*$)(\S.*)",
    re.DOTALL,
)
_ONLY = re.compile(r"\s*\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*\(([A-J])\)\s*\}\s*")
_OPTION = re.compile(r"(?:\\text\s*\{)?\s*(?:option|choice|answer)\s*:?\s+(\(?[A-J]\)?)\s*\}?", re.IGNORECASE)


def read_choice(text: str) -> tuple[str, str] | None:
    r"""The letter and the value of "\text{(B)} 12" or "B. 12"; None for any other raw text."""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    *letters, value = match.groups()
    return next(letter for letter in letters if letter), value


def only_choice(text: str) -> str | None:
    r"""The letter of "\text{(B)}", which is surely a choice; None for any other raw text."""
    match = _ONLY.fullmatch(text)
    return match[1] if match else None


def is_letter(letter: str, text: str, any_case: bool = False) -> bool:
    """Whether a text is the letter of a choice."""
    said = normalize(without_option(text)).strip("().: ")
    return (said.upper() if any_case else said) == letter


def without_option(text: str) -> str:
    """The letter of "Option B"; any other raw text as it is."""
    option = _OPTION.fullmatch(text)
    return option[1] if option else text
