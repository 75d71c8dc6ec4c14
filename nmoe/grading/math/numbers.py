r"""Parses numbers as people write them to exact rationals, and compares them with a tolerance.

In ASCII digits it reads: integers and decimals, `a/b` and `\frac{a}{b}` (also `\frac12`), mixed numbers (`1\frac{1}{2}`, `1
1/2`; the fraction must be proper), scientific notation (`1.5\times10^{3}`, `1.5*10^3`, `1.5e3`, with exponents up to 1000)
and repeating decimals (`0.1\overline{6}`, `0.1(6)`). "inf", "nan" and "9**9**9" are texts.

If neither side is a decimal, two numbers must be equal. A decimal may also be the other number rounded or cut off: they then
differ by less than one unit of its last digit, and by at most 1e-6 * min(1, |gold|). The tolerance is absolute for large golds,
so that every digit of a long integer counts, and relative for small ones, so that 0 is not 0.0000001. 23.9999999 is 24 neither
rounded nor cut off. A gold is taken for rounded if it has six significant digits.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from nmoe.grading.math.normalization import MAX_ANSWER_CHARS

TOLERANCE = Fraction(1, 10**6)
_ROUNDED_DIGITS = 6
_MAX_EXPONENT = 1000

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_PART = r"(?:\{([0-9]+)\}|([0-9]))"
_SIGNED_PART = r"(?:\{(-?[0-9]+)\}|([0-9]))"
_PLAIN = re.compile(rf"[+-]?{_DECIMAL}")
_RATIO = re.compile(rf"([+-]?)(?:\\frac{_SIGNED_PART}{_SIGNED_PART}|([0-9]+)/([0-9]+))")
_MIXED = re.compile(rf"([+-]?)([0-9]+)(?:\\frac{_PART}{_PART}| ([0-9]+)/([0-9]+))")
_SCIENTIFIC = re.compile(
    rf"([+-]?{_DECIMAL})(?:(?:\\times|\\cdot|\*|×|·) ?10\^(?:\{{([+-]?[0-9]+)\}}|([+-]?[0-9]+))|[eE]([+-]?[0-9]+))"
)
_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)(?:\\(?:overline|bar)\{?([0-9]+)\}?|\(([0-9]+)\))")


@dataclass(frozen=True)
class Number:
    """A parsed number: its exact value, and properties of its spelling.

    `places` is the number of digits after the point of a decimal, which may be rounded (less the exponent of ten: 1 for 1.50e1);
    None for exact numbers. `simplest` is False for a fraction not in lowest terms, a fraction that is an integer, a scientific
    number whose first factor is not from 1 to 10, and repeated nines or zeros: their value is still to be worked out.
    """

    value: Fraction
    places: int | None = None
    simplest: bool = True

    @property
    def decimal(self) -> bool:
        """Whether the number is written as a decimal."""
        return self.places is not None


def read_number(text: str) -> Number | None:
    """Reads a normalised text that is a number as a whole; None for any other text."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    if _PLAIN.fullmatch(text):
        whole, point, digits = text.partition(".")
        return Number(Fraction(text), len(digits) if point else None)
    if match := _RATIO.fullmatch(text):
        sign, numerator, denominator = _parts(match)
        lowest = math.gcd(int(numerator), int(denominator)) == 1 < abs(int(denominator))
        return _ratio(sign, numerator, denominator, lowest)
    if match := _MIXED.fullmatch(text):
        sign, whole, numerator, denominator = _parts(match)
        if int(numerator) >= int(denominator):
            return None
        lowest = math.gcd(int(numerator), int(denominator)) == 1 <= int(whole)
        return _ratio(sign, int(whole) * int(denominator) + int(numerator), denominator, lowest)
    if match := _SCIENTIFIC.fullmatch(text):
        coefficient, exponent = (part for part in match.groups() if part is not None)
        if len(exponent) > 5 or abs(int(exponent)) > _MAX_EXPONENT:
            return None
        digits = coefficient.partition(".")[2]
        places = len(digits) - int(exponent) if digits else None
        return Number(
            Fraction(coefficient) * Fraction(10) ** int(exponent), places, 1 <= abs(Fraction(coefficient)) < 10
        )
    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, *cycles = match.groups()
        cycle = cycles[0] or cycles[1]
        value = Fraction(int(whole + fixed + cycle or "0") - int(whole + fixed or "0"))
        value /= 10 ** len(fixed) * (10 ** len(cycle) - 1)
        return Number(-value if sign == "-" else value, None, not set(cycle) <= {"9"} and not set(cycle) <= {"0"})
    return None


def _parts(match: re.Match[str]) -> list[str]:
    """Returns the texts that the groups of a regular expression's match matched, the sign (which may be empty) first."""
    sign, *rest = match.groups()
    return [sign or "", *(part for part in rest if part is not None)]


def _ratio(sign: str, numerator: int | str, denominator: str, lowest: bool) -> Number | None:
    if int(denominator) == 0:
        return None
    value = Fraction(int(numerator), int(denominator))
    return Number(-value if sign == "-" else value, None, lowest)


def same(gold: Number, answer: Number) -> bool:
    """Returns whether the answer's value equals the gold's, exactly or rounded if either is a decimal."""
    if gold.value == answer.value:
        return True
    if gold.places is None and answer.places is None:
        return False
    if not is_near(abs(gold.value - answer.value), abs(gold.value)):
        return False
    if gold.places is not None and (answer.places is None or gold.places < answer.places):
        return rounds(gold, answer.value)
    return abs(gold.value - answer.value) < _unit(answer)


def is_near(difference: Fraction, size: Fraction) -> bool:
    """Returns whether a difference from a gold number of this absolute value is within the tolerance."""
    return difference <= TOLERANCE * min(Fraction(1), size)


def rounds(decimal: Number, value: Fraction) -> bool:
    """Returns whether a decimal could be `value` rounded or cut off: it has at least six significant digits, and differs by
    less than one unit of its last digit."""
    unit = _unit(decimal)
    return abs(decimal.value / unit) >= 10 ** (_ROUNDED_DIGITS - 1) and abs(decimal.value - value) < unit


def _unit(decimal: Number) -> Fraction:
    """Returns one unit of the last digit of a decimal: 0.01 for 3.14."""
    return Fraction(10) ** -(decimal.places or 0)


_COMMA = re.compile(r"(?<![0-9,])([0-9]+),([0-9]+)(?![0-9,])")
_COMMA_IN_BRACKETS = re.compile(r"[(\[{][^()\[\]{}]*[0-9],[0-9]")
_RUN_OF_COMMAS = re.compile(r"[0-9],[0-9]+,[0-9]")


def decimal_commas(text: str) -> str | None:
    """Returns the text with decimal commas replaced by points; None if it has no decimal comma.

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


_UNMARKED = re.compile(r"[^0-9]*[1-9][0-9]*,[0-9]+[\s$.]*")


def is_surely_decimal(text: str) -> bool:
    """Returns whether the comma in a text with decimal commas cannot separate a list: the text has a unit, braces around the
    comma, or a zero before it ("0,5")."""
    return _UNMARKED.fullmatch(text) is None
