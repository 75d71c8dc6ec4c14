r"""A scalar of an answer: its number, and the unit, currency, percent sign or base that it is written with.

    "5\text{ cm}"    the number 5 with the unit "cm"
    "50\%"           50 with "%"
    "$5"             5 with "$"
    "101_2"          the digits 101 with the base "2"

Before `normalize` removes the braces, `forms` marks letters in braces whose command declares them to be words (`UNIT_OPEN`,
`UNIT_CLOSE`): they are the unit of the value before them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.numbers import Number, read_number
from nmoe.grading.math.units import is_unit, known_unit, spell_unit

UNIT_OPEN, UNIT_CLOSE = "\ue000", "\ue001"
_MARKED_UNIT = re.compile(
    rf"(.+?){UNIT_OPEN}\s*([^{UNIT_OPEN}{UNIT_CLOSE}]*?)\s*{UNIT_CLOSE}(?:\^\{{?([0-9])\}}?)?", re.DOTALL
)
MARKS = re.compile(f"[{UNIT_OPEN}{UNIT_CLOSE}]")

_DEGREE = re.compile(r"(.+?)(?:\^\\circ|\\degree)")
_PERCENT = re.compile(r"(.+?)\\?%")
_BARE_UNIT = re.compile(r"(.*[0-9}\])]|.*\\pi) ?([A-Za-z][A-Za-z ]*(?:/[A-Za-z]+)?)(?:\^\{?([0-9])\}?)?")
_LETTER_UNIT = re.compile(r"([0-9.,]+) ?([a-z])(?:\^\{?([23])\}?)?")
_TIME = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))? ?([ap])\.? ?m\.?", re.IGNORECASE)
_DOLLARS = re.compile(r"\s*(\$?)[+-]?\\?\$\s?[0-9.,]+\1\s*")
# Degrees are a unit of an angle, but in a function's argument they are not the unit of its value.
_ANGLE = re.compile(r"(?:[^A-Za-z\\]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z])|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z]))+")
_FOREIGN_CURRENCY = re.compile(r"([€£¥₹₩₽])(.+)")
_BASE = re.compile(r"(?:([0-9A-Fa-f]+)|\(([0-9A-Fa-f]+)\))_(?:\{([0-9]{1,2}|[a-z]+)\}|([0-9]))")
_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?!and\b)([A-Za-z]+)")
_AMOUNTS = re.compile(rf"{_AMOUNT.pattern}(?:(?:, and|,| and)? ?{_AMOUNT.pattern})+")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_BASES |= {"ten": "10", "twelve": "12", "sixteen": "16"}

_WORD_SIGNS = {
    r"\emptyset": [
        "empty set",
        "the empty set",
        "null set",
        "none",
        *(
            f"{no}{real}solution{s}"
            for no in ("no ", "there is no ", "there are no ")
            for real in ("", "real ")
            for s in ("", "s")
        ),
    ],
    r"\mathbb{R}": ["all real", "all reals", "all real numbers", "any real number", "real numbers", "the real numbers"],
}
_SIGN_OF = {words: sign for sign, spellings in _WORD_SIGNS.items() for words in spellings}
REALS = r"\mathbb{R}"


@dataclass(frozen=True)
class Scalar:
    """One value: its text without the unit, and its number if it is one.

    `unit` is "" without one, "%" for percent, whose number is the one before the sign, and "$" for a dollar sign, which may be
    TeX's; the word is "dollar". `base` is a subscript base, "" without one.
    """

    text: str
    number: Number | None
    unit: str = ""
    base: str = ""


def dollars(text: str) -> Number | None:
    """The number after a dollar sign that no other closes; None for any other raw text."""
    return read_number(normalize(text)) if _DOLLARS.fullmatch(text) else None


def read_scalar(text: str) -> Scalar:
    """Reads a scalar and takes off its unit or base."""
    if text[-1:] in "mM." + UNIT_CLOSE and (time := _TIME.fullmatch(MARKS.sub(" ", text).strip().replace("  ", " "))):
        return Scalar(f"{int(time[1])}:{time[2] or '00'} {time[3].lower()}m", None)
    if match := _MARKED_UNIT.fullmatch(text):
        return _with_unit(match[1], spell_unit(match[2], match[3] or ""))
    text = normalize(MARKS.sub(" ", text))
    text = _SIGN_OF.get(text.lower().removeprefix("the set of "), text)
    if number := read_number(text):
        return Scalar(text, number)
    if match := _BASE.fullmatch(text):
        base = match[3] or match[4]
        digits = (match[1] or match[2]).lstrip("0").upper() or "0"
        base = _BASES.get(base, base)
        written = base.isdigit() and all(int(digit, 16) < int(base) for digit in digits)  # a_2 is the second of some a
        return Scalar(digits, read_number(digits), base=base) if written else Scalar(text, None)
    if match := _PERCENT.fullmatch(text):
        return _with_unit(match[1], "%")
    if match := _DEGREE.fullmatch(text):
        return _with_unit(match[1], "degree")
    if match := _FOREIGN_CURRENCY.fullmatch(text):
        return _with_unit(match[2], match[1])
    if match := _BARE_UNIT.fullmatch(text):
        words, unit = match[2], spell_unit(match[2], match[3] or "")
        # A single letter may be a variable: 5m. Unknown words are a unit only after a number: 18 apples.
        counted = is_unit(words) and read_number(normalize(match[1])) is not None
        if (len(words) > 1 and known_unit(unit)) or counted:
            return _with_unit(match[1], unit)
    return Scalar(text, None)


def _with_unit(text: str, unit: str) -> Scalar:
    value = normalize(MARKS.sub(" ", text))
    if unit == "degree" and not _ANGLE.fullmatch(value):
        return Scalar(rf"{value}^\circ", None)
    return Scalar(value, read_number(value), unit)


def read_amounts(text: str) -> list[tuple[Number, str]] | None:
    """The numbers and units of "2 hours and 30 minutes"; None for a normalised text other than several amounts of known units."""
    if not _AMOUNTS.fullmatch(text):
        return None
    found = [(read_number(number), spell_unit(unit, "")) for number, unit in _AMOUNT.findall(text)]
    known = [(number, unit) for number, unit in found if number is not None and known_unit(unit)]
    return known if len(known) == len(found) else None


def letter_unit(scalar: Scalar) -> Scalar | None:
    """A number with one letter, "7 m", as a number with a unit, which it is if the question asks for that; else None."""
    match = _LETTER_UNIT.fullmatch(scalar.text)
    return None if match is None else _with_unit(match[1], spell_unit(match[2], match[3] or ""))


def percent_value(number: Number) -> Number:
    """The value of a percentage: 50% is 0.5."""
    places = None if number.places is None else number.places + 2
    return Number(number.value / 100, places, number.simplest)
