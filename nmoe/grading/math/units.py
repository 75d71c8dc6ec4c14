r"""Parses single values (scalars) with the unit, currency, percent sign or base that they are written with.

    "5\text{ cm}"    the number 5 with the unit "cm"
    "50\%"           50 with "%"
    "$5"             5 with "$"
    "101_2"          the digits 101 with the base "2"

LaTeX commands such as `\text` declare letters to be words. Before `normalize` removes their braces, nmoe.grading.math.forms puts
the marks `UNIT_OPEN` and `UNIT_CLOSE` around such letters: they are the unit of the value before them.

Every unit is reduced to one spelling (`spell_unit`). Some words can follow a number without being its unit, such as "factorial".
The units that a question asks for, as in "in centimeters", are found by `asked_units`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from nmoe.grading.math import expressions
from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.numbers import Number, read_number

_UNITS = {
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "meter": "m metre",
    "in": "inch",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "kg": "kilogram",
    "mg": "milligram",
    "gram": "g",
    "lb": "lbs pound",
    "oz": "ounce",
    "ml": "milliliter millilitre",
    "liter": "l litre",
    "sec": "s second",
    "min": "minute",
    "hr": "h hour",
    "day": "",
    "degree": "deg",
    "%": "percent percentage pct",
    "mph": "mi/hr",
    "km/hr": "kmh kph",
    "dollar": "",
    "cent": "",
    "unit": "",
}
_UNIT_NAMES = {spelling: name for name, spellings in _UNITS.items() for spelling in [name, *spellings.split()]}
_PER = re.compile(r"\s+per\s+|\s*/\s*", re.IGNORECASE)
_POWER_WORDS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
# Words in a unit's place that change the number: an answer that leaves one out has not given the number.
_FACTOR_WORDS = """
dozen hundred thousand million billion trillion lakh crore gross myriad score pair couple trio triple triplet quartet
brace ream kilo mega giga tera milli micro nano bn mn mil ppm permille half halve third quarter fourth fifth sixth
seventh eighth ninth tenth eleventh twelfth hundredth thousandth millionth one two three four five six seven eight
nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety factorial root power exponent mod modulo
modulus choose plus minus less more fewer over under above below times multiplied divided by remainder inverse
reciprocal opposite negated negative conjugate complement doubled tripled quadrupled halved double twice thrice fold
squared cubed off out of to not except without approximately nearly almost binary octal decimal hexadecimal pi
infinity repeating recurring and or equals is
"""
_FACTORS = {*_FACTOR_WORDS.split(), *expressions.FUNCTIONS} - {"sec"}
# In running text these are common words more often than units.
_COMMON_WORDS = {"in", "min", "second", "seconds", "sec", "pound", "mi"}
# "What percent of 80 is 20?" asks for a percentage, "What is 20 percent of 80?" does not.
_PERCENT_ASKED = re.compile(r"\b(?:what|which|many|the|as|an?|in|nearest)\s+percent(?:age)?\b", re.IGNORECASE)
_MENTION = re.compile(
    r"(?:\b(square|cubic|sq\.?|cu\.?) )?([A-Za-z]+|\^\{?\\circ)(?:\}?\^\{?([23])|(?: (squared|cubed)\b))?",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"\b(?:how many|number of|(?<!there are )in|nearest)((?: [A-Za-z-]+){1,6})", re.IGNORECASE)
_AMOUNT = re.compile(r"\$ ?[0-9]")
_MEASURES = {"2": re.compile(r"\barea\b", re.IGNORECASE), "3": re.compile(r"\bvolume\b", re.IGNORECASE)}
_NO_NOUN = {
    "more",
    "fewer",
    "less",
    "total",
    "different",
    "other",
    "of",
    "the",
    "a",
    "whole",
    "full",
    "extra",
    "additional",
}
_WORDS_AFTER_NOUN = """
of in on at to from with for and or that who which than are is was were be been does do did has have had will would
can could must should may might he she it they we you there his her its their the a an if after before when each every
"""
_END_OF_NOUN = frozenset(_WORDS_AFTER_NOUN.split())


def spell_unit(words: str, power: str) -> str:
    """Returns the standard spelling of a unit: "cm^2" for "square centimetres" and "cm^2".

    An unknown unit keeps its words without a plural s. If a word changes the number, the spelling starts with a star: "*million".
    """
    over, per, under = _PER.sub("/", words).partition("/")
    if per and over.strip() and under.strip():
        unit = f"{spell_unit(over, '')}/{spell_unit(under, power)}"
        return _UNIT_NAMES.get(unit, unit)
    names = words.lower().replace(".", " ").split()
    powers = [_POWER_WORDS[name] for name in names if name in _POWER_WORDS]
    spelled = "".join(name for name in names if name not in _POWER_WORDS)
    singulars = (spelled, spelled.removesuffix("s"), spelled.removesuffix("es"))
    unit = next((_UNIT_NAMES[one] for one in singulars if one in _UNIT_NAMES), spelled.removesuffix("s"))
    power = power or "".join(powers)
    changing = any({name, name.removesuffix("s")} & _FACTORS for name in names if name not in _POWER_WORDS)
    factor = "*" if changing or (len(names) > 1 and _UNIT_NAMES.get(names[0]) == "%") else ""
    return f"{factor}{unit}^{power}" if power and power != "1" else f"{factor}{unit}"


def known_unit(unit: str) -> bool:
    """Returns whether a unit, as `spell_unit` writes it, is in the table of known units."""
    return unit.partition("^")[0] in _UNITS


def is_unit(words: str) -> bool:
    """Returns whether words after a number may name the thing that is counted."""
    return any(len(word) >= 3 for word in words.split())


def changes_number(unit: str) -> bool:
    """Returns whether a "unit" multiplies or changes the number before it: "million", "quarters", "squared", "%"."""
    return unit == "%" or unit.startswith(("^", "*"))


@lru_cache(256)
def asked_units(question: str) -> frozenset[str]:
    """Returns the units that an answer to a question may have, as `spell_unit` writes them.

    That is the counted thing ("how many brown eggs": egg, brownegg), or a unit after "how many" or "in" with its power ("in square
    feet": ft^2). Otherwise it is the only unit that the question names, with the powers that it is named with or "area" or
    "volume" stand for.
    """
    found: dict[str, set[str]] = {}
    for words, power in _mentions(question):
        found.setdefault(spell_unit(words, ""), set()).add(power)
    asked = set[str]().union(*map(_counted, _COUNTED.findall(question)))
    exact = {unit for unit in asked if known_unit(unit)}
    if len(found) != 1:
        return frozenset(asked)
    name, powers = next(iter(found.items()))
    if exact:
        return frozenset(asked)
    measured = {power for power, words in _MEASURES.items() if words.search(question)} if name != "degree" else set()
    return frozenset(asked | {f"{name}^{power}" if power else name for power in powers | measured})


def _mentions(question: str) -> Iterator[tuple[str, str]]:
    """Yields the units that a question names, each with its power."""
    for match in _MENTION.finditer(question):
        before, word, power, after = match.groups()
        if "circ" in word:
            yield "degree", ""
        elif len(word) > 1 and word not in _COMMON_WORDS and known_unit(spell_unit(word, "")):
            words = (before or after or "").lower().removesuffix(".")
            yield word, power or _POWER_WORDS.get(words, {"cu": "3"}.get(words, ""))


def _counted(words: str) -> set[str]:
    """Returns the possible units in the words after "how many" or "in": the noun, and the noun with the words before it."""
    names: list[str] = []
    for name in words.lower().split():
        if name in _END_OF_NOUN:
            break
        if names or name not in _NO_NOUN:
            names.append(name)
    if "per" in names:
        return {spell_unit(" ".join(names), "")}
    whole = [index for index, name in enumerate(names) if {name, name.removesuffix("s")} & _FACTORS]
    first = max(whole, default=len(names))
    phrases = [names[start:end] for end in range(1, len(names) + 1) for start in range(min(end, first + 1))]
    if any(name in _POWER_WORDS for name in names):
        phrases = [phrase for phrase in phrases if phrase[0] in _POWER_WORDS and len(phrase) > 1]
    elif whole:
        phrases = [phrase for phrase in phrases if names[first] in phrase]
    return {spell_unit(" ".join(phrase), "") for phrase in phrases}


def asks_percent(question: str) -> bool:
    """Returns whether a question asks for a percentage and names no other unit."""
    named = {spell_unit(words, "") for words, _ in _mentions(question)}
    return named == {"%"} and _PERCENT_ASKED.search(question) is not None


@lru_cache(256)
def asks_cents(question: str) -> bool:
    """Returns whether a question asks for an amount in cents: explicitly, or because it names cents and no amount in dollars."""
    asked = set[str]().union(*map(_counted, _COUNTED.findall(question)))
    return "cent" in asked or ("cent" in asked_units(question) and _AMOUNT.search(question) is None)


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
_ONE_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?!and\b)([A-Za-z]+)")
_AMOUNTS = re.compile(rf"{_ONE_AMOUNT.pattern}(?:(?:, and|,| and)? ?{_ONE_AMOUNT.pattern})+")
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
    """One value of an answer: its text without the unit, and its number if it is one.

    `unit` is "" without one, "%" for percent, whose number is the one before the sign, and "$" for a dollar sign, which may be
    TeX's; the word is "dollar". `base` is a subscript base, "" without one.
    """

    text: str
    number: Number | None
    unit: str = ""
    base: str = ""


def dollars(text: str) -> Number | None:
    """Returns the number in a text that is an amount such as "$5"; None for any other raw text, such as "$5$", where dollar signs
    enclose a formula."""
    return read_number(normalize(text)) if _DOLLARS.fullmatch(text) else None


def read_scalar(text: str) -> Scalar:
    """Parses a single value and separates its unit or base."""
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
    """Returns numbers and units of several amounts, as in "2 hours and 30 minutes"; None for any other normalised text, and if a
    unit is not known."""
    if not _AMOUNTS.fullmatch(text):
        return None
    found = [(read_number(number), spell_unit(unit, "")) for number, unit in _ONE_AMOUNT.findall(text)]
    known = [(number, unit) for number, unit in found if number is not None and known_unit(unit)]
    return known if len(known) == len(found) else None


def letter_unit(scalar: Scalar) -> Scalar | None:
    """Reads a number with one letter, such as "7 m", as a number with a unit, for questions that ask for that unit; None for other
    scalars.
    """
    match = _LETTER_UNIT.fullmatch(scalar.text)
    return None if match is None else _with_unit(match[1], spell_unit(match[2], match[3] or ""))


def percent_value(number: Number) -> Number:
    """Returns the value of a percentage: 0.5 for 50%."""
    places = None if number.places is None else number.places + 2
    return Number(number.value / 100, places, number.simplest)


def same_amounts(gold: str, answer: str) -> bool:
    """Returns whether both are the same amounts of units in the same order: "2 hours 30 minutes" and "2 hours and 30 minutes"."""
    return (amounts := read_amounts(gold)) is not None and amounts == read_amounts(answer)


_NUMBER_SET = re.compile(r"\\mathbb\{([A-Z])\}")


def same_number_set(gold: str, answer: str) -> bool:
    r"""Returns whether two texts denote the same set of numbers, in blackboard or plain letters, or the empty set, which may be
    written as \phi."""
    if gold == r"\emptyset":
        return answer in (r"\phi", r"\Phi")
    return r"\mathbb" in gold + answer and _NUMBER_SET.sub(r"\1", gold) == _NUMBER_SET.sub(r"\1", answer)
