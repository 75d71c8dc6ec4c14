"""Extracts answers from completions without a box, for models that were not asked to box their answers.

It is `extraction = "prose"` of an environment and `--extract prose` of `nmoe grade`. In this order:

  1. the boxes, if there are any, as `nmoe.grading.extraction` reads them;
  2. else the text after the last "the answer is", "Final Answer:", "Answer:" or "####": a formula, formulas joined by "and" or
  a
     comma, or the words to the end of the sentence; one or two words after a number are dropped;
  3. else the last formula in dollar signs or other math delimiters, or the last number, whichever comes later. Of a chain
     "2+3 = 5" the last part counts.

It never looks at the gold answer. It reads the text in a single pass, so unclosed formulas cost no more than others.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from nmoe.grading.denial import without_denied
from nmoe.grading.extraction import (
    LAST_NUMBER,
    NOTHING_EXTRACTED,
    NUMBER,
    Extraction,
    from_final,
    from_response,
    is_prose,
    joins,
    last_boxed,
)
from nmoe.grading.math.units import changes_number, spell_unit

_MARKER = re.compile(
    r"\banswer(?:\W{0,4}| (?:to|of|for) [^.\n$]{1,60})\s(?:is|was|would be|equals)\b"
    r"|\banswer\W{0,4}:|\*\*final answer\*\*|####",
    re.IGNORECASE,
)
_AFTER_MARKER = re.compile(r"(?:[\s:*]|(?:is|therefore|thus|option|choice)\b)*", re.IGNORECASE)
_SENTENCE = re.compile(r"(?:[^.\n]|\.(?=\S))*")
_DELIMITER = re.compile(r"\\\\|\\\$|\$\$|\$|\\[()\[\]]")
_CLOSED_BY = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_COUNT = re.compile(r"(\$?[-+]?[0-9][0-9,]*(?:\.[0-9]+)?)((?: [A-Za-z]+){1,2})")


@dataclass(frozen=True)
class _Formula:
    content: str
    start: int
    end: int


def from_prose(text: str) -> Extraction:
    """Extracts the answer from a whole completion by the rules above."""
    if last_boxed(text) is not None:
        return from_response(text)
    answer = _after_marker(text) or _last(without_denied(text))
    return Extraction(answer, LAST_NUMBER if answer else NOTHING_EXTRACTED, False, False)


def from_prose_final(text: str) -> Extraction:
    """Extracts the answer from a final message: by the rules above if the message is prose without a box, else as `from_final`
    does.
    """
    found = from_prose(text) if last_boxed(text) is None and is_prose(text) else None
    return found if found and found.answer else from_final(text, bare_final=False)


def _after_marker(text: str) -> str | None:
    markers = deque(_MARKER.finditer(text), maxlen=1)
    if not markers:
        return None
    begin = _AFTER_MARKER.match(text, markers[0].end())
    assert begin is not None, "it matches nothing, too"
    start = begin.end()
    sentence = _SENTENCE.match(text, start)
    assert sentence is not None, "it matches nothing, too"
    words = sentence.group()
    formulas = _formulas(text[start:])
    if formulas and formulas[0].start < max(len(words), 1):
        words = words[: formulas[0].start]
        if not re.search("[0-9]", words):
            return _joined(text[start:], formulas, 0)
    words = words.strip().strip("*").strip()
    count = _COUNT.fullmatch(words)
    if count and not changes_number(spell_unit(count[2], "")) and not {"to", "or", "and"} & set(count[2].split()):
        return count[1]
    return words or None


def _last(text: str) -> str | None:
    formulas = _formulas(text)
    numbers = deque(NUMBER.finditer(text, formulas[-1].end if formulas else 0), maxlen=1)
    if numbers:
        return numbers[0].group().rstrip(",")
    if not formulas:
        return None
    index = len(formulas) - 1
    while index and joins(text[formulas[index - 1].end : formulas[index].start]):
        index -= 1
    return _joined(text, formulas, index)


def _joined(text: str, formulas: list[_Formula], index: int) -> str | None:
    """Returns the values of the formula at an index and of the formulas after it that are joined to it, separated by commas; None
    if they are empty.
    """
    found = [formulas[index]]
    for formula in formulas[index + 1 :]:
        if not joins(text[found[-1].end : formula.start]):
            break
        found.append(formula)
    return ", ".join(filter(None, (_value(formula.content) for formula in found))) or None


def _value(formula: str) -> str:
    """Returns the last side of a chain of equations, or of an equation between numbers; any other formula whole."""
    sides = formula.strip().rstrip(".").split("=")
    calculates = len(sides) > 2 or (
        len(sides) == 2 and not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", sides[0]))
    )
    return (sides[-1] if calculates else "=".join(sides)).strip()


def _formulas(text: str) -> list[_Formula]:
    """Returns the formulas between math delimiters, in the text's order."""
    found: list[_Formula] = []
    opened: re.Match[str] | None = None
    for token in _DELIMITER.finditer(text):
        sign = token.group()
        if opened is not None and sign == _CLOSED_BY[opened.group()]:
            found.append(_Formula(text[opened.end() : token.start()], opened.start(), token.end()))
            opened = None
        elif opened is None and sign in _CLOSED_BY:
            opened = token
    return [formula for formula in found if formula.content.strip()]
