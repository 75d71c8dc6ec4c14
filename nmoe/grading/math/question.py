r"""What the question says about an answer: its own expressions do not answer it, nor do unevaluated ones.

"Simplify $\sqrt{180}$" has the gold `6\sqrt{5}`, and `\sqrt{180}` has the same value. So have `\sqrt{180}+0` and
`{\sqrt{180}}`. That is why shapes are compared (`nmoe.grading.math.shape`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from nmoe.grading.math.expressions import FUNCTIONS
from nmoe.grading.math.numbers import read_number
from nmoe.grading.math.shape import Shape, add, is_atom, multiply, parts, shape

# Signs of an unevaluated expression. A fraction is a number, and so is a repeating decimal.
_UNEVALUATED = re.compile(
    r"[+*^!]|[\d})]\s*-|[\d})]\s*\(|\\(?!(?:[dt]?frac|overline|text|mathrm|left|right)(?![A-Za-z]))[A-Za-z]+"
)
_EQUATION_WORDS = re.compile(
    r"equation|\bline|asymptote|\baxis|directrix|tangent|locus|curve|circle|graph|plane", re.IGNORECASE
)
# Splits at words too, because a question may have formulas without dollar signs.
_WORDS = re.compile(
    r"(?<![\\A-Za-z])(?!(?:sqrt|pi|" + "|".join(FUNCTIONS) + r")(?![A-Za-z]))"
    r"[A-Za-z]{2,}(?![A-Za-z])|\$+|\\[()\[\]]|[.?!;:,](?=\s|$|\$|\\)|\\(?:text|begin|end|left|right)\b|&|\\\\"
)
_RELATION = re.compile(r"<=|>=|[=<>]|\\(?:leq?|geq?|neq?|leqslant|geqslant|lt|gt|equiv|approx)(?![A-Za-z])")
_MAX_QUESTION_CHARS = 20_000


def is_unevaluated(text: str) -> bool:
    """Whether a normalised text other than a number is still to be evaluated."""
    return _UNEVALUATED.search(text) is not None


def wants_equation(question: str) -> bool:
    """Whether the answer may be an equation, or a number stand for one: the line x = 4."""
    return _EQUATION_WORDS.search(question) is not None


def repeats(question: str, answer: str, gold: str) -> bool:
    """Whether an answer, a scalar in normalised text, is an expression of the question that differs from the gold."""
    if read_number(answer) is not None:
        return False
    written = shape(answer)
    if written is None:
        return len(answer) > 2 and _squeezed(answer) in _squeezed(question)
    if is_atom(written) or written == shape(gold):
        return False
    return written in _expressions(question) or _squeezed(answer) in _squeezed(question)


def repeats_equation(question: str, sides: Sequence[str], gold: Sequence[str]) -> bool:
    """Whether an equation, given by its sides, is one of the question's that differs from the gold."""
    written = _difference(*sides)
    if written is None or (len(gold) == 2 and written == _difference(*gold)):
        return False
    return written in _equations(question)


def _difference(left: str, right: str) -> frozenset[Shape] | None:
    """The differences of two sides: left minus right and right minus left."""
    shapes = shape(left), shape(right)
    if shapes[0] is None or shapes[1] is None:
        return None
    minus = shape("-1")
    return frozenset(add([one, multiply([minus, other])]) for one, other in (shapes, shapes[::-1]))


@lru_cache(256)
def _expressions(question: str) -> frozenset[Shape]:
    sides = (side for formula in _formulas(question) for side in _RELATION.split(formula))
    found = (shape(side) for side in sides)
    return frozenset(part for one in found if one is not None for part in parts(one))


@lru_cache(256)
def _equations(question: str) -> frozenset[frozenset[Shape]]:
    pairs = (formula.split("=") for formula in _formulas(question) if formula.count("=") == 1)
    found = (_difference(*pair) for pair in pairs)
    return frozenset(one for one in found if one is not None)


def _formulas(question: str) -> list[str]:
    """The texts between the words of a question that may be formulas."""
    pieces = _WORDS.split(question[:_MAX_QUESTION_CHARS])
    return [piece.strip(" .,;:?") for piece in pieces if 2 < len(piece) <= 1000]


def _squeezed(text: str) -> str:
    return re.sub(r"[\s$]|\\left|\\right|(?<=\\)[dt](?=frac)", "", text)
