r"""Rules that the question sets for an answer: the question's own expressions do not answer it, and it may ask for a form.

"Simplify $\sqrt{180}$" has the gold `6\sqrt{5}`, and `\sqrt{180}` has the same value. So have `180^{0.5}` and `|\sqrt{180}|`.
That is why shapes are compared (`nmoe.grading.math.shape`), with the arithmetic of constants done (`worked.folded`).

A `Policy` says which differences in form an answer with the gold's value may have: by settings of a task, and by its question.

Policy()                                        pairs without a question, as in `nmoe grade`
Policy(answer_order="as_gold")                  "2, 1" is wrong for "1, 2"
Policy(question="Simplify $\sqrt{180}$.")       an expression from the question does not answer it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from nmoe.grading.math.expressions import FUNCTIONS
from nmoe.grading.math.numbers import read_number
from nmoe.grading.math.shape import Shape, add, is_atom, multiply, parts, shape
from nmoe.grading.math.worked import folded, has_root_below, has_square_factor

POLICY_KEYS = ("answer_order", "units")
"""The settings of a task pool that become fields of a `Policy`."""

AnswerOrder = Literal["any", "as_gold"]
Units = Literal["asked", "as_gold", "any"]


@dataclass(frozen=True)
class Policy:
    """The differences in form that an answer may have from the gold.

    `answer_order`: whether a list without brackets, "1, 2", is ordered. A list of tuples is never ordered, and named values
    are always compared by name.

    `units`: which unit an answer may add to a gold without one. "asked": the one that the question names, if it names only
    one. "as_gold": none. "any": all but those that change the number, like % and "dozen".

    `question`: None to compare two texts by value. Otherwise the answer is to a question, "" if its text is unknown: it has to be
    worked out (`nmoe.grading.math.worked`), and an expression of the question is no answer.
    """

    answer_order: AnswerOrder = "any"
    units: Units = "asked"
    question: str | None = None

    @property
    def arguments(self) -> tuple[AnswerOrder, Units, str | None]:
        """The policy's fields as arguments that can be sent to a worker process: `Policy(*arguments)` equals this policy."""
        return self.answer_order, self.units, self.question


DEFAULT = Policy()


_FACTOR = re.compile(r"\bfactor(?:[^a-z]|i[sz]|ed|ing|$)", re.IGNORECASE)
_EXPAND = re.compile(r"\bexpand|multiply out|without (?:brackets|parentheses)", re.IGNORECASE)
_SIMPLIFY = re.compile(r"\bsimplif|\bsimplest|\bradical form", re.IGNORECASE)
_RATIONALIZE = re.compile(r"\brationali[sz]", re.IGNORECASE)
# A question that has a number and asks for another form of it.
_CONVERT = re.compile(
    r"\b(?:as|in|into|to)\s+(?:(?:an?|its|the)\s+)?(?:[a-z]+\s+){0,3}?"
    r"(?:decimals?|fractions?|percent|percentage|mixed|scientific|ratio of|quotient of|standard form|lowest terms|simplest)\b"
    r"|\bdecimal (?:form|expansion|representation|equivalent|value)"
    r"|\bfraction(?:al)? (?:form|(?:is |that is )?(?:equal|equivalent)|(?:that )?equals)"
    r"|\bequivalent (?:fraction|decimal|percent)|\bwhat percent|\bsimplif|\bsimplest|\breduce\b|\bconvert|\brewrite",
    re.IGNORECASE,
)
# It asks for the value of the expression at its end: "Compute 1/8."
_VALUE_OF = re.compile(
    r"(?:.*\b(?:what(?:'s| is)|compute|evaluate|calculate|find|determine|work out|value of)\b"
    r"(?:\s*(?:the|exact|following|expression|value|of|quotient|number|result)\b)*:?|[^A-Za-z]*(?=[\\$0-9]))(.*)",
    re.IGNORECASE | re.DOTALL,
)
_LITERAL = re.compile(r"(?<![0-9.,])[0-9]*\.[0-9]+(?![0-9])|(?<![0-9.,])[0-9]+(?:\.[0-9]+)?(?=\\?%)")
_EQUATION_WORDS = re.compile(
    r"equation|\bline|asymptote|\baxis|directrix|tangent|locus|curve|circle|graph|plane", re.IGNORECASE
)
# Splits at words too, because a question may have formulas without dollar signs.
_WORDS = re.compile(
    r"(?<![\\A-Za-z])(?!(?:sqrt|pi|" + "|".join(FUNCTIONS) + r")(?![A-Za-z]))"
    r"[A-Za-z]{2,}(?![A-Za-z])|\$+|\\[()\[\]]|[.?!;:,](?=\s|$|\$|\\)|\\(?:text|begin|end|left|right)\b|&|\\\\"
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_RELATION = re.compile(r"<=|>=|[=<>]|\\(?:leq?|geq?|neq?|leqslant|geqslant|lt|gt|equiv|approx)(?![A-Za-z])")
_MAX_QUESTION_CHARS = 20_000


def wants_equation(question: str) -> bool:
    """Returns whether the answer to a question may be an equation, or a number that stands for one, as 4 for the line x = 4."""
    return _EQUATION_WORDS.search(question) is not None


def repeats(question: str, answer: str, gold: str) -> bool:
    """Returns whether an answer, a scalar in normalised text, only repeats an expression of the question that differs from the
    gold.

    A number in simplest form repeats the question only where that asks for another form of it, or for its value alone.
    """
    number = read_number(answer)
    if number is not None:
        if number.simplest and not _asks_form(question, answer):
            return False  # a number of the question may be the answer: tails are as probable as heads
        if "\\" in answer and answer != gold and _squeezed(answer) in _squeezed(question):
            return True
        if not _expressions(question) and not _literals(question):
            return False
    written = shape(answer)
    if written is None:
        return len(answer) > 2 and _squeezed(answer) in _squeezed(question)
    wanted = shape(gold)
    if is_atom(written):
        return "." in answer and wanted != written and answer.lstrip("+-0") in _literals(question)
    if written == wanted:
        return False
    if written in _expressions(question):
        return True
    if number is not None:
        return False
    if _squeezed(answer) in _squeezed(question):
        return True
    return wanted is not None and folded(written) != folded(wanted) and folded(written) in _folded_expressions(question)


def _asks_form(question: str, number: str) -> bool:
    """Returns whether a question asks for another form of its numbers, or for nothing but the value of this number."""
    if _CONVERT.search(question):
        return True
    asked = _VALUE_OF.fullmatch(question)
    if asked is None or _PROSE.search(asked[1]):
        return False
    return [shape(one) or one for one in _formulas(asked[1])] == [shape(number) or number]


def is_as_asked(question: str, answer: str, gold: str) -> bool:
    """Returns whether an answer has the form that the question asks for (factored, expanded, simplified), provided that the
    gold has it."""
    written, wanted = shape(answer), shape(gold)
    if written is None or wanted is None or is_atom(written) or written == wanted:
        return True
    if _FACTOR.search(question) and _is_product(wanted) and _is(written, "+"):
        return False
    if _EXPAND.search(question) and not _has_brackets(wanted) and _has_brackets(written):
        return False
    if _SIMPLIFY.search(question) and has_square_factor(written) and not has_square_factor(wanted):
        return False
    return not (_RATIONALIZE.search(question) and has_root_below(written) and not has_root_below(wanted))


def _is(one: Shape, sign: str) -> bool:
    return isinstance(one, tuple) and one[0] == sign


def _is_product(one: Shape) -> bool:
    return _is(one, "*") or (_is(one, "^") and _is(one[1], "+"))


def _has_brackets(one: Shape) -> bool:
    """Returns whether an expression, given as a tree of operations, contains a sum that is multiplied or raised to a power."""
    return any(
        part[0] in ("*", "^") and any(_is(inner, "+") for inner in (part[1:2] if part[0] == "^" else part[1:]))
        for part in parts(one)
    )


def repeats_equation(question: str, sides: Sequence[str], gold: Sequence[str]) -> bool:
    """Returns whether an equation, given by its two sides, repeats an equation of the question that differs from the
    gold answer."""
    written = _difference(*sides)
    if written is None or (len(gold) == 2 and written == _difference(*gold)):
        return False
    return written in _equations(question)


def _difference(left: str, right: str) -> frozenset[Shape] | None:
    """Returns left minus right and right minus left as shapes, equal for an equation and its mirror image; None if a side is not an
    expression.
    """
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
def _folded_expressions(question: str) -> frozenset[Shape]:
    return frozenset(map(folded, _expressions(question)))


@lru_cache(256)
def _literals(question: str) -> frozenset[str]:
    """Returns the decimals and percentages in a question, without leading zeros."""
    return frozenset(number.lstrip("0") for number in _LITERAL.findall(question))


@lru_cache(256)
def _equations(question: str) -> frozenset[frozenset[Shape]]:
    pairs = (formula.split("=") for formula in _formulas(question) if formula.count("=") == 1)
    found = (_difference(*pair) for pair in pairs)
    return frozenset(one for one in found if one is not None)


def _formulas(question: str) -> list[str]:
    """Returns the pieces of a question between its words, each of which may be a formula."""
    pieces = _WORDS.split(question[:_MAX_QUESTION_CHARS])
    return [piece.strip(" .,;:?") for piece in pieces if 2 < len(piece) <= 1000]


def _squeezed(text: str) -> str:
    return re.sub(r"[\s$]|\\left|\\right|(?<=\\)[dt](?=frac)", "", text)
