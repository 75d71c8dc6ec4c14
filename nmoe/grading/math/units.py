"""Units: one spelling of each, the words that stand in a unit's place but are not units, and the unit that a question asks for."""

from __future__ import annotations

import re
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
    "mph": "milesperhour",
    "dollar": "",
    "cent": "",
    "unit": "",
}
_UNIT_NAMES = {spelling: name for name, spellings in _UNITS.items() for spelling in [name, *spellings.split()]}
_POWER_WORDS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
# Words in a unit's place that change the number: an answer that leaves one out has not given the number.
_FACTORS = {
    "dozen",
    "hundred",
    "thousand",
    "million",
    "billion",
    "trillion",
    "lakh",
    "crore",
    "gross",
    "myriad",
}
_FACTORS |= {
    "half",
    "halve",
    "third",
    "quarter",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
}
_FACTORS |= {
    "twelfth",
    "hundredth",
    "thousandth",
    "factorial",
    "root",
    "power",
    "mod",
    "choose",
    "plus",
    "minus",
    "less",
    "more",
}
_FACTORS |= {"over", "times", "pi", *expressions.FUNCTIONS} - {"sec"}
# In running text these are common words more often than units.
_COMMON_WORDS = {"in", "min", "second", "seconds", "sec", "pound", "mi"}
# "What percent of 80 is 20?" asks for a percentage, "What is 20 percent of 80?" does not.
_PERCENT_ASKED = re.compile(r"\b(?:what|which|many|the|as|an?|in|nearest)\s+percent(?:age)?\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]+|\^\{?\\circ")


def spell_unit(words: str, power: str) -> str:
    """The standard spelling of a unit: "square centimetres" and "cm^2" are "cm^2".

    An unknown unit is its words without a plural s. A unit with a word that changes the number starts with a star: "*million".
    """
    names = words.lower().replace(".", " ").split()
    powers = [_POWER_WORDS[name] for name in names if name in _POWER_WORDS]
    spelled = "".join(name for name in names if name not in _POWER_WORDS)
    singulars = (spelled, spelled.removesuffix("s"), spelled.removesuffix("es"))
    unit = next((_UNIT_NAMES[one] for one in singulars if one in _UNIT_NAMES), spelled.removesuffix("s"))
    power = power or "".join(powers)
    factor = "*" if any({name, name.removesuffix("s")} & _FACTORS for name in names) else ""
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
def asked_unit(question: str) -> str | None:
    """The unit that a question names, without its power; None if it names none or several."""
    found = set()
    for word in _WORD.findall(question):
        if "circ" in word:
            found.add("degree")
        elif len(word) > 1 and word not in _COMMON_WORDS and known_unit(unit := spell_unit(word, "")):
            found.add(unit)
    return found.pop() if len(found) == 1 else None


def asks_percent(question: str) -> bool:
    """Whether a question asks for a percentage and names no other unit."""
    return asked_unit(question) == "%" and _PERCENT_ASKED.search(question) is not None
