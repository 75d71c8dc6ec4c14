r"""Numbers as people write them, read as exact rationals, and the tolerance for comparing them.

In ASCII digits it reads: integers and decimals, `a/b` and `\frac{a}{b}` (also `\frac12`), mixed numbers (`1\frac{1}{2}`, `1
1/2`; the fraction must be proper), scientific notation (`1.5\times10^{3}`, `1.5*10^3`, `1.5e3`, with exponents up to 1000)
and repeating decimals (`0.1\overline{6}`, `0.1(6)`). "inf", "nan" and "9**9**9" are texts.

If neither side is a decimal, two numbers must be equal. If either is, they may differ by 1e-6 * min(1, |gold|). The tolerance
is absolute for large golds, so that every digit of a long integer counts, and relative for small ones, so that 0 is not
0.0000001.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from nmoe.grading.math.normalization import MAX_ANSWER_CHARS

TOLERANCE = Fraction(1, 10**6)
_MAX_EXPONENT = 1000

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_PART = r"(?:\{([0-9]+)\}|([0-9]))"
_SIGNED_PART = r"(?:\{(-?[0-9]+)\}|([0-9]))"
_PLAIN = re.compile(rf"[+-]?{_DECIMAL}")
_RATIO = re.compile(rf"([+-]?)(?:\\frac{_SIGNED_PART}{_PART}|([0-9]+)/([0-9]+))")
_MIXED = re.compile(rf"([+-]?)([0-9]+)(?:\\frac{_PART}{_PART}| ([0-9]+)/([0-9]+))")
_SCIENTIFIC = re.compile(
    rf"([+-]?{_DECIMAL})(?:(?:\\times|\\cdot|\*|×|·) ?10\^(?:\{{([+-]?[0-9]+)\}}|([+-]?[0-9]+))|[eE]([+-]?[0-9]+))"
)
_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)(?:\\(?:overline|bar)\{?([0-9]+)\}?|\(([0-9]+)\))")


@dataclass(frozen=True)
class Number:
    """A value, and whether it was written as a decimal, which may be rounded."""

    value: Fraction
    decimal: bool


def read_number(text: str) -> Number | None:
    """Reads a normalised text that is a number as a whole; None for any other text."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    if _PLAIN.fullmatch(text):
        return Number(Fraction(text), "." in text)
    if match := _RATIO.fullmatch(text):
        sign, numerator, denominator = _parts(match)
        return _ratio(sign, numerator, denominator)
    if match := _MIXED.fullmatch(text):
        sign, whole, numerator, denominator = _parts(match)
        if int(numerator) >= int(denominator):
            return None
        return _ratio(sign, int(whole) * int(denominator) + int(numerator), denominator)
    if match := _SCIENTIFIC.fullmatch(text):
        coefficient, exponent = (part for part in match.groups() if part is not None)
        if len(exponent) > 5 or abs(int(exponent)) > _MAX_EXPONENT:
            return None
        return Number(Fraction(coefficient) * Fraction(10) ** int(exponent), "." in coefficient)
    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, *cycles = match.groups()
        cycle = cycles[0] or cycles[1]
        value = Fraction(int(whole + fixed + cycle or "0") - int(whole + fixed or "0"))
        value /= 10 ** len(fixed) * (10 ** len(cycle) - 1)
        return Number(-value if sign == "-" else value, False)
    return None


def _parts(match: re.Match[str]) -> list[str]:
    """The sign, which may be empty, and then the groups that matched."""
    sign, *rest = match.groups()
    return [sign or "", *(part for part in rest if part is not None)]


def _ratio(sign: str, numerator: int | str, denominator: str) -> Number | None:
    if int(denominator) == 0:
        return None
    value = Fraction(int(numerator), int(denominator))
    return Number(-value if sign == "-" else value, False)


def same(gold: Number, answer: Number) -> bool:
    """Whether the answer's value equals the gold's, within the tolerance if either is a decimal."""
    if not (gold.decimal or answer.decimal):
        return gold.value == answer.value
    return abs(gold.value - answer.value) <= TOLERANCE * min(Fraction(1), abs(gold.value))


_COMMA = re.compile(r"(?<![0-9,])([0-9]+),([0-9]+)(?![0-9,])")
_COMMA_IN_BRACKETS = re.compile(r"[(\[{][^()\[\]{}]*[0-9],[0-9]")
_RUN_OF_COMMAS = re.compile(r"[0-9],[0-9]+,[0-9]")


def decimal_commas(text: str) -> str | None:
    """Replaces decimal commas by points; None if the text has none.

    "3,5" has one. "1,234", "1, 2", "1,2,3" and "(1,2)" have none; in brackets a comma is decimal only beside semicolons, as in
    "(1,5; 2,5)".
    """
    if "," not in text:
        return None
    plain = text.replace("{,}", ",")
    found = _COMMA.findall(plain)
    thousands = any(len(after) == 3 and len(before) <= 3 and before[0] != "0" for before, after in found)
    if not found or thousands or _RUN_OF_COMMAS.search(plain):
        return None
    if ";" not in plain and _COMMA_IN_BRACKETS.search(plain):
        return None
    return _COMMA.sub(r"\1.\2", plain)
