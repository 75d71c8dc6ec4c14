"""What a whole answer looks like in datasets of reasoning-gym whose verifiers read a part of it and ignore the rest.

`quantum_lock` takes every A, B and C out of any text, `gsm_symbolic` the first number, `time_intervals` the first word, and
`word_sorting` the first words. Some datasets have several right answers, so that the gold cannot be asked for.
"""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_TIME = r"\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?"
_CLAIM = r"\w+ is an? \w+"
_MOVE = r"Move disk \d+ from Peg \d+ to Peg \d+"

_FORMS = {
    "advanced_geometry": rf"\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)|{_NUMBER}\s*°?",
    # No letter has two digits.
    "cryptarithm": r"(?!.*([A-Z])\s*=.*\1\s*=)[A-Z]\s*=\s*\d(?:\s*,\s*[A-Z]\s*=\s*\d)*",
    "fraction_simplification": r"(\$?)\s*(?:\d+\s*/\s*\d+|\\d?frac\{\d+\}\{\d+\})\s*\1",
    "gsm_symbolic": r"[-+]?[\d,]*(?:\d|\.\d+)",
    "kakurasu": r"[01\s,]+",
    # Nobody is two things.
    "knights_knaves": rf"(?!.*\b(\w+) is .*\b\1 is ){_CLAIM}(?:,? and {_CLAIM}|, {_CLAIM})*\.?",
    "polynomial_equations": rf"(?:{_NUMBER}(?:\s*,\s*{_NUMBER})*)?",
    "quantum_lock": r"[A-Ca-c](?:\s*(?:(?:→|->|,)\s*)?[A-Ca-c])*",
    "rush_hour": r"[A-Z][+-]\d+(?:[\s,]+[A-Z][+-]\d+)*",
    "sokoban": r"[UDLRudlr\s]+",
    "survo": r"[\d\s,]+",
    "time_intervals": rf"\d+(?: days?)?|{_TIME}|\d+ days?, {_TIME}",
    "tower_of_hanoi": rf"{_MOVE}(?:[^\S\n]*\n\s*{_MOVE})*",
}
_WHOLE = {name: re.compile(form) for name, form in _FORMS.items()}

# Their only right answer is the gold; case is theirs to choose in the first two.
_WORDS_IN_ANY_CASE = {"spell_backward", "letter_jumble"}
_WORDS = {"word_sorting"}
_NUMBERS = {"gsm_symbolic": Fraction(0), "coin_flip": Fraction(1, 10**4)}
"""Datasets whose answer is a number, with the largest difference from the gold."""


def has_form(name: str, answer: str, gold: str) -> bool:
    """Whether the whole answer is one to a problem of this dataset; True for datasets whose verifiers read all of it."""
    answer = answer.strip()
    if name in _WHOLE and not _WHOLE[name].fullmatch(answer):
        return False
    if name in _WORDS or name in _WORDS_IN_ANY_CASE:
        said, right = (re.sub(r"\s*,\s*", ", ", " ".join(text.split())) for text in (answer, gold))
        return said == right if name in _WORDS else said.casefold() == right.casefold()
    if name in _NUMBERS:
        try:
            return abs(Fraction(answer.replace(",", "")) - Fraction(gold.replace(",", ""))) <= _NUMBERS[name]
        except (ValueError, ZeroDivisionError):
            return False
    # Its verifier compares `bool(answer) == bool(gold)` on two texts.
    if name == "game_of_life_halting":
        return answer.casefold() == gold.casefold()
    # There is no distance between nan and any number.
    return name != "complex_arithmetic" or not re.search("nan|inf", answer, re.IGNORECASE)
