r"""Whether two answers are the same, in layers: the same text, the same number, the same form part by part, and for
expressions whatever a `Leaves` says, which is math-verify in a worker process.

Decided in favour of "incorrect" wherever the text leaves a doubt: the policy, row by row, is docs/grading.md. One rule is
behind most of it: **what the gold says may be left out by the answer, what it does not say may not be added**. "5" is right for
"5 cm" and for "x = 5"; "5 cm" is wrong for "5". Exceptions are named where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from nmoe.rl.grading import expressions
from nmoe.rl.grading.forms import Answer, Compound, Form, Scalar, percent_value, read_answer
from nmoe.rl.grading.normalization import MAX_ANSWER_CHARS, normalize
from nmoe.rl.grading.numbers import read_number, same
from nmoe.rl.grading.verdict import Verdict

# Matching two sets takes the product of their sizes.
_MAX_SET = 30
_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,15}")
_WORD = re.compile(r"[^\W\d_]{3,}|\bNo\b")
# Words that stand like a unit and multiply: who leaves one out gives another number.
_MAGNITUDES = ("dozen", "hundred", "thousand", "million", "billion", "trillion")


class Leaves(Protocol):
    """What decides about expressions: True or False, or None where it leaves that to another."""

    def expressions(self, gold: str, answer: str) -> bool | None:
        """Whether two expressions have the same value, for all values of their variables."""

    def equations(self, gold: tuple[str, str], answer: tuple[str, str]) -> bool | None:
        """Whether two equations, each by its sides, are the same up to a constant factor."""


class _Undecided:
    """Leaves every expression that can be read to the symbolic layer."""

    def expressions(self, gold: str, answer: str) -> bool | None:
        readable = expressions.latex(gold) is not None and expressions.latex(answer) is not None
        return None if readable and expressions.comparable(gold, answer) else False

    def equations(self, gold: tuple[str, str], answer: tuple[str, str]) -> bool | None:
        sides = [expressions.latex(side) for side in (*gold, *answer)]
        return None if None not in sides and expressions.comparable("=".join(gold), "=".join(answer)) else False


UNDECIDED = _Undecided()


def settle(gold: str, answer: str, *, any_order: bool = False) -> Verdict | None:
    """The verdict of the exact, numeric and structural layers on raw answers; None where expressions have to be compared.

    `any_order`: lists without brackets, "1, 2", are sets. Total, and quick: an answer beyond `MAX_ANSWER_CHARS` characters is
    incorrect unread.
    """
    gold, answer = gold.strip(), answer.strip()
    if _PLAIN_INTEGER.fullmatch(gold) and _PLAIN_INTEGER.fullmatch(answer):
        equal = int(gold) == int(answer)
        return _EXACT if equal else _OTHER_NUMBER
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return Verdict.of(False, "exact", "empty" if not answer else f"longer than {MAX_ANSWER_CHARS} characters")
    gold_text, answer_text = normalize(gold), normalize(answer)
    if not answer_text:
        return Verdict.of(False, "exact", "empty without its typesetting")
    if gold_text == answer_text:
        return _EXACT
    gold_number, answer_number = read_number(gold_text), read_number(answer_text)
    if gold_number is not None and answer_number is not None:
        return _SAME_NUMBER if same(gold_number, answer_number) else _OTHER_NUMBER
    found = compare(gold, answer, UNDECIDED, any_order=any_order)
    if found is None:
        return None
    return Verdict.of(found, "structure", "the same part by part" if found else "not the same form or value")


_EXACT = Verdict.of(True, "exact", "the same text")
_SAME_NUMBER = Verdict.of(True, "numeric", "the same number")
_OTHER_NUMBER = Verdict.of(False, "numeric", "another number")


def compare(gold: str, answer: str, leaves: Leaves, *, any_order: bool) -> bool | None:
    """Whether two raw answers are the same, part by part; None where `leaves` leaves open what it depends on."""
    return _Comparison(leaves).answers(*(_with_order(read_answer(text), any_order) for text in (gold, answer)))


def _with_order(answer: Answer, any_order: bool) -> Answer:
    if any_order and isinstance(answer.form, Compound) and answer.form.kind == "list":
        return replace(answer, form=replace(answer.form, kind="set"))
    return answer


class _Comparison:
    """Three-valued: None is "that depends on the leaves"."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves

    def answers(self, gold: Answer, answer: Answer) -> bool | None:
        if gold.text == answer.text:
            return True
        if gold.label and answer.label:
            if gold.label == answer.label:
                return self.forms(gold.form, answer.form)
            return self.forms(gold.relation or gold.form, answer.relation or answer.form)
        if gold.label:
            equation = self.forms(gold.relation or gold.form, answer.form)
            return equation or (self.forms(gold.form, answer.form) if _may_lose_label(gold) else equation)
        if answer.label:
            equation = self.forms(gold.form, answer.relation or answer.form)
            labelled = answer.label not in _text_of(answer.form)  # "x = x + 1" names nothing
            return equation or (self.forms(gold.form, answer.form) if labelled else equation)
        return self.forms(gold.form, answer.form)

    def forms(self, gold: Form, answer: Form) -> bool | None:
        if isinstance(gold, Scalar) or isinstance(answer, Scalar):
            both = isinstance(gold, Scalar) and isinstance(answer, Scalar)
            return self.scalars(gold, answer) if both else False  # type: ignore[arg-type]
        if (intervals := _intervals(gold, answer)) is not None:
            gold, answer = intervals
        if gold.kind in ("set", "union"):
            # A list in any order will do where the gold has none.
            if answer.kind != gold.kind and not (gold.kind == "set" and answer.kind == "list"):
                return False
            return self.unordered(gold.parts, answer.parts)
        if gold.kind != answer.kind:
            return False
        if gold.kind == "relation":
            return self.relations(gold, answer)
        if gold.detail != answer.detail:
            return False
        return self.ordered(gold.parts, answer.parts)

    def ordered(self, gold: Sequence[Form], answer: Sequence[Form]) -> bool | None:
        if len(gold) != len(answer):
            return False
        return _all(self.forms(one, other) for one, other in zip(gold, answer, strict=True))

    def unordered(self, gold: Sequence[Form], answer: Sequence[Form]) -> bool | None:
        """Whether the parts can be paired. Greedy: parts that are equal are equal to the same others."""
        if len(gold) != len(answer) or len(gold) > _MAX_SET:
            return False
        left, open_ = list(answer), False
        for part in gold:
            found = [self.forms(part, other) for other in left]
            if True in found:
                left.pop(found.index(True))
            elif None in found:
                open_ = True
            else:
                return False
        return None if open_ else True

    def relations(self, gold: Compound, answer: Compound) -> bool | None:
        if gold.detail != answer.detail:
            return False
        straight = self.ordered(gold.parts, answer.parts)
        if gold.detail not in ("=", r"\ne") or straight:
            return straight
        swapped = self.ordered(gold.parts, answer.parts[::-1])
        if swapped or gold.detail != "=":
            return _any([straight, swapped])
        sides = [part.text for part in (*gold.parts, *answer.parts) if isinstance(part, Scalar) and not part.unit]
        if len(sides) != 4:
            return False
        return self._leaves.equations((sides[0], sides[1]), (sides[2], sides[3]))

    def scalars(self, gold: Scalar, answer: Scalar) -> bool | None:
        if gold.base or answer.base:
            return answer.base in ("", gold.base) and gold.base != "" and gold.text == answer.text.lstrip("0").upper()
        if gold.unit == "%" and answer.unit == "" and gold.number and answer.number:
            return same(gold.number, answer.number) or same(percent_value(gold.number), answer.number)
        if answer.unit == "%" and gold.unit == "" and gold.number and answer.number:
            return same(gold.number, percent_value(answer.number))
        # TeX leaves dollar signs around numbers, so that one says nothing where the gold has no unit.
        if answer.unit not in ("", gold.unit, "" if gold.unit else "dollar"):
            return False
        if not answer.unit and gold.unit.startswith(_MAGNITUDES):
            return False
        if gold.text == answer.text:
            return True
        if gold.number is not None and answer.number is not None:
            return same(gold.number, answer.number)
        if _sentence_case(gold.text) == _sentence_case(answer.text):
            return True
        return self._leaves.expressions(gold.text, answer.text)


def _may_lose_label(gold: Answer) -> bool:
    r"""The name of a function, what lies in a set, and a constant's name; "y = 2x" without "y =" is no equation."""
    in_set = isinstance(gold.relation, Compound) and gold.relation.detail == r"\in"
    return "(" in gold.label or in_set or not expressions.letters(_text_of(gold.form)) - {"e", "i"}


def _text_of(form: Form) -> str:
    return form.text if isinstance(form, Scalar) else " ".join(map(_text_of, form.parts))


def _sentence_case(text: str) -> str:
    """Words of three letters or more, and "No", with a small first letter: "East" is "east", but a point A is not a."""
    return _WORD.sub(lambda word: word[0][0].lower() + word[0][1:], text) if "\\" not in text else text


def _intervals(gold: Compound, answer: Compound) -> tuple[Compound, Compound] | None:
    r"""Both as intervals, where one is written with brackets and the other as inequalities. The gold must be an interval beyond
    doubt: "(1, 2)" may be a point."""
    if "relation" in (answer.kind, gold.kind) or "set" in (answer.kind, gold.kind):
        gold_interval, answer_interval = _as_interval(gold), _as_interval(answer)
        if gold_interval is None or answer_interval is None or gold.kind == answer.kind:
            return None
        if gold.kind == "brackets" and gold.detail == "()" and r"\infty" not in _text_of(gold):
            return None
        return gold_interval, answer_interval
    return None


def _as_interval(form: Compound) -> Compound | None:
    if form.kind == "brackets":
        return form if len(form.parts) == 2 and form.detail in ("()", "(]", "[)", "[]") else None
    if form.kind in ("union", "set"):
        parts = [_as_interval(part) for part in form.parts if isinstance(part, Compound)]
        if len(parts) != len(form.parts) or None in parts:
            return None
        return Compound("union", tuple(part for part in parts if part is not None))
    if form.kind != "relation":
        return None
    signs, sides = form.detail.split(","), form.parts
    closed = {"<": False, r"\le": True}
    if any(sign not in closed for sign in signs) or not all(isinstance(side, Scalar) for side in sides):
        return None
    if len(sides) == 3 and _is_variable(sides[1]):
        low, high = closed[signs[0]], closed[signs[1]]
        return Compound("brackets", (sides[0], sides[2]), ("[" if low else "(") + ("]" if high else ")"))
    if len(sides) == 2 and _is_variable(sides[0]) and not _is_variable(sides[1]):
        return Compound("brackets", (Scalar(r"-\infty", None), sides[1]), "(" + ("]" if closed[signs[0]] else ")"))
    if len(sides) == 2 and _is_variable(sides[1]) and not _is_variable(sides[0]):
        return Compound("brackets", (sides[0], Scalar(r"\infty", None)), ("[" if closed[signs[0]] else "(") + ")")
    return None


def _is_variable(form: Form) -> bool:
    return isinstance(form, Scalar) and re.fullmatch(r"[A-Za-z]|\\(?:theta|alpha|lambda)", form.text) is not None


def _all(found: Iterable[bool | None]) -> bool | None:
    open_ = False
    for one in found:
        if one is False:
            return False
        open_ = open_ or one is None
    return None if open_ else True


def _any(found: Sequence[bool | None]) -> bool | None:
    return True if True in found else None if None in found else False
