"""Units: one spelling of each, the words that stand in a unit's place but are not units, and the unit that a question asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from nmoe.grading.math import expressions

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
    """The standard spelling of a unit: "square centimetres" and "cm^2" are "cm^2".

    An unknown unit is its words without a plural s. A unit with a word that changes the number starts with a star: "*million".
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
    """Whether a unit, as `spell_unit` writes it, is in the table."""
    return unit.partition("^")[0] in _UNITS


def is_unit(words: str) -> bool:
    """Whether words after a number may be what it counts."""
    return any(len(word) >= 3 for word in words.split())


def changes_number(unit: str) -> bool:
    """Whether words in a unit's place change the number: "million", "quarters", "squared", "%"."""
    return unit == "%" or unit.startswith(("^", "*"))


@lru_cache(256)
def asked_units(question: str) -> frozenset[str]:
    """The units that an answer to a question may have, as `spell_unit` writes them.

    That is what is counted ("how many brown eggs": egg, brownegg), or a unit after "how many" or "in" with its power ("in square
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
    """The units that a question names, each with its power."""
    for match in _MENTION.finditer(question):
        before, word, power, after = match.groups()
        if "circ" in word:
            yield "degree", ""
        elif len(word) > 1 and word not in _COMMON_WORDS and known_unit(spell_unit(word, "")):
            words = (before or after or "").lower().removesuffix(".")
            yield word, power or _POWER_WORDS.get(words, {"cu": "3"}.get(words, ""))


def _counted(words: str) -> set[str]:
    """The units in the words after "how many" or "in": the noun, and the noun with the words before it."""
    names: list[str] = []
    for name in words.lower().split():
        if name in _END_OF_NOUN:
            break
        if names or name not in _NO_NOUN:
            names.append(name)
    if "per" in names:
        return {spell_unit(" ".join(names), "")}
    whole = [place for place, name in enumerate(names) if {name, name.removesuffix("s")} & _FACTORS]
    first = max(whole, default=len(names))
    phrases = [names[start:end] for end in range(1, len(names) + 1) for start in range(min(end, first + 1))]
    if any(name in _POWER_WORDS for name in names):
        phrases = [phrase for phrase in phrases if phrase[0] in _POWER_WORDS and len(phrase) > 1]
    elif whole:
        phrases = [phrase for phrase in phrases if names[first] in phrase]
    return {spell_unit(" ".join(phrase), "") for phrase in phrases}


def asks_percent(question: str) -> bool:
    """Whether a question asks for a percentage and names no other unit."""
    named = {spell_unit(words, "") for words, _ in _mentions(question)}
    return named == {"%"} and _PERCENT_ASKED.search(question) is not None


@lru_cache(256)
def asks_cents(question: str) -> bool:
    """Whether a question asks for cents: it says so, or names cents and no amount in dollars."""
    asked = set[str]().union(*map(_counted, _COUNTED.findall(question)))
    return "cent" in asked or ("cent" in asked_units(question) and _AMOUNT.search(question) is None)
