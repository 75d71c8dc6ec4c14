r"""Exact match of answers: the same text after normalisation, or the same number.

Normalisation takes away what is typesetting and keeps what is meaning:
  - `$...$`, `$$...$$`, `\(...\)`, `\[...\]` and `**...**` around the whole answer; trailing periods; a currency sign
    before a number; U+2212 becomes "-";
  - `\text \textbf \mathrm \mathbf` (the braces' content stays); `\left`, `\right`, and the spacing commands `\! \, \; \:`;
  - `\dfrac` and `\tfrac` become `\frac`;
  - white space collapses to one space, and to none beside punctuation, save one after a comma;
  - a whole answer that is a number loses its thousands separators, its plus sign and its leading zeros. In "(1,234)" and
    "1, 234" the comma stays: those are two numbers.

Numbers are integers, decimals, `a/b` and `\frac{a}{b}` in ASCII digits, compared as exact rationals, never as floats. Where
either side is written as a decimal, they may differ by 1e-6 * min(1, |gold|): absolute for large golds, so that a long
integer can not be missed by a digit, and relative for small ones, so that 0 is not 0.0000001.
"inf", "nan", "1e9" and "9**9**9" are texts.
"""

from __future__ import annotations

import re
from fractions import Fraction

# Longer than any gold of the known sets (a gold beyond it is refused when its pool loads), so that no answer, however
# hostile, costs more than this many characters of work.
MAX_ANSWER_CHARS = 1000
TOLERANCE = Fraction(1, 10**6)

_DROPPED = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;:]")
_FRACTION_COMMAND = re.compile(r"\\[dt]frac(?![A-Za-z])")
_WRAPPERS = re.compile(r"(?P<wrapper>\\(?:text|textbf|mathrm|mathbf)\s*\{)|\\.|[{}]", re.DOTALL)
_ENCLOSURES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
_CURRENCY = re.compile(r"^([+-]?)\\?\$(?=[0-9.,]+$)")
_IDLE_SPACE = re.compile(r" (?!\w)|(?<![\w,]) ")
_LIST_COMMA = re.compile(r",(?=\S)")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_NUMBER = re.compile(r"\+?(-?)(?:0+(?=[0-9]))?([0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_RATIO = re.compile(r"(-?)(?:\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|([0-9]+)/([0-9]+))")


def normalize(text: str) -> str:
    """The answer without its typesetting; idempotent. For nested typesetting the time grows with the length squared."""
    previous = None
    while text != previous:  # no rule adds what another takes away, so this ends
        previous = text
        text = _normalize_once(text)
    return text


def _normalize_once(text: str) -> str:
    text = text.replace("−", "-").replace("{,}", ",")
    text = _FRACTION_COMMAND.sub(r"\\frac", _DROPPED.sub("", text))
    text = _strip_enclosure(_unwrap(text).strip().rstrip(". "))
    text = _CURRENCY.sub(r"\1", text)
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    if number := _NUMBER.fullmatch(text):
        text = "".join(number.groups())
    # A comma that is left separates items. With its space it can not turn into a thousands separator: "1, 234" is two.
    return _LIST_COMMA.sub(", ", _IDLE_SPACE.sub("", re.sub(r"\s+", " ", text)))


def _unwrap(text: str) -> str:
    """Drops the text commands, each with the brace that closes it."""
    is_wrapper: list[bool] = []

    def replacement(token: re.Match[str]) -> str:
        if token["wrapper"] or token.group() == "{":
            is_wrapper.append(token["wrapper"] is not None)
            return "" if token["wrapper"] else "{"
        if token.group() == "}" and is_wrapper and is_wrapper.pop():
            return ""
        return token.group()

    return _WRAPPERS.sub(replacement, text)


def _strip_enclosure(text: str) -> str:
    for left, right in _ENCLOSURES:
        inner = text[len(left) : -len(right)]
        encloses = len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right)
        if encloses and left not in inner and right not in inner:  # "$1$ and $2$" is not enclosed
            return inner
    return text


def number(text: str) -> Fraction | None:
    """The value of a normalised text that is wholly a number; None for any other text."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    if match := _NUMBER.fullmatch(text):
        return Fraction(match.group())
    match = _RATIO.fullmatch(text)
    if match is None:
        return None
    sign, *parts = match.groups()
    numerator, denominator = (int(part) for part in parts if part is not None)
    if denominator == 0:
        return None
    return Fraction(-numerator if sign else numerator, denominator)


def equal(gold: str, answer: str) -> bool:
    """Whether two answers are the same; total, and False for an answer beyond `MAX_ANSWER_CHARS` characters."""
    answer = answer.strip()
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return False
    gold, answer = normalize(gold), normalize(answer)
    if gold == answer:
        return bool(answer)
    gold_value, answer_value = number(gold), number(answer)
    if gold_value is None or answer_value is None:
        return False
    if "." not in gold + answer:
        return gold_value == answer_value
    return abs(gold_value - answer_value) <= TOLERANCE * min(Fraction(1), abs(gold_value))
