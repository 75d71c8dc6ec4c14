"""Compares two answers in layers: the same text, the same number, the same form part by part.

Single expressions are left to an object of type `Leaves`, such as math-verify in a worker process.

If the text is ambiguous, the answer is incorrect. docs/guides/grading.md states the policy, row by row. Most of it follows one
rule: **an answer may leave out what the gold says, but not add what the gold does not say**. "5" is right for "5 cm" and for
"x = 5"; "5 cm" is wrong for "5". Exceptions are named in the code where they apply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from nmoe.grading.extraction import joined_boxes
from nmoe.grading.math import expressions
from nmoe.grading.math.forms import Answer, Compound, Form, read_answer
from nmoe.grading.math.intervals import REAL_LINE, as_intervals
from nmoe.grading.math.labels import (
    asked_value,
    is_letter,
    may_have_condition,
    may_lose_label,
    only_choice,
    read_choice,
    text_of,
    value_of,
    with_index_of,
    with_names,
    without_option,
)
from nmoe.grading.math.names import renamed_arguments
from nmoe.grading.math.normalization import MAX_ANSWER_CHARS, normalize, same_words, sentence_case
from nmoe.grading.math.numbers import Number, decimal_commas, is_surely_decimal, read_number, same
from nmoe.grading.math.question import DEFAULT, Policy, is_as_asked, repeats, repeats_equation, wants_equation
from nmoe.grading.math.shape import differ, equations_differ
from nmoe.grading.math.units import (
    REALS,
    Scalar,
    asked_units,
    asks_cents,
    asks_percent,
    changes_number,
    dollars,
    letter_unit,
    percent_value,
    same_amounts,
    same_number_set,
)
from nmoe.grading.math.worked import is_worked_out
from nmoe.types import Verdict

# Matching two sets takes time proportional to the product of their sizes.
_MAX_SET = 30
# One sign like a half becomes eleven characters.
_MAX_NORMALIZED_CHARS = 2 * MAX_ANSWER_CHARS
_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,15}")
_YES_OR_NO = re.compile(r"(yes|no), \S.*", re.IGNORECASE | re.DOTALL)


class Leaves(Protocol):
    """The protocol for comparing single expressions, the leaves of an answer's form. Each method returns True or False, or None to
    leave the decision to another layer.
    """

    def expressions(self, gold: str, answer: str) -> bool | None:
        """Returns whether two expressions are equal for all values of their variables."""

    def equations(self, gold: tuple[str, str], answer: tuple[str, str]) -> bool | None:
        """Returns whether two equations, each given by its sides, are equal up to a constant factor."""


class _Undecided:
    """Leaves expressions to the symbolic layer (None), except for unreadable ones and those with certainly different values
    (False).
    """

    def expressions(self, gold: str, answer: str) -> bool | None:
        readable = expressions.both_latex(gold, answer) is not None
        return None if readable and expressions.comparable(gold, answer) and not differ(gold, answer) else False

    def equations(self, gold: tuple[str, str], answer: tuple[str, str]) -> bool | None:
        sides = [expressions.latex(side) for side in (*gold, *answer)]
        readable = None not in sides and expressions.comparable("=".join(gold), "=".join(answer))
        return None if readable and not equations_differ(gold, answer) else False


UNDECIDED = _Undecided()


def settle(gold: str, answer: str, policy: Policy = DEFAULT) -> Verdict | None:
    """Compares raw answers as texts, numbers and forms, and returns the verdict; None if expressions must be compared symbolically.

    Total and fast. An answer of more than `MAX_ANSWER_CHARS` characters is incorrect without being read.
    """
    gold, answer = gold.strip(), answer.strip()
    if _PLAIN_INTEGER.fullmatch(gold) and _PLAIN_INTEGER.fullmatch(answer):
        equal = int(gold) == int(answer)
        return _EXACT if equal else _OTHER_NUMBER
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return Verdict.of(False, "exact", "empty" if not answer else f"longer than {MAX_ANSWER_CHARS} characters")
    if "box" in answer or "box" in gold:
        return _structural(compare(gold, answer, UNDECIDED, policy))
    gold_text, answer_text = normalize(gold), normalize(answer)
    if len(answer_text) > _MAX_NORMALIZED_CHARS:
        return Verdict.of(False, "exact", f"longer than {_MAX_NORMALIZED_CHARS} characters as LaTeX")
    if not answer_text:
        return Verdict.of(False, "exact", "empty without its typesetting")
    if "$" not in answer or dollars(answer) is None:  # a dollar sign is a unit if the question asks for another unit
        if gold_text == answer_text:
            return _EXACT
        gold_number, answer_number = read_number(gold_text), read_number(answer_text)
        if gold_number is not None and answer_number is not None:
            if not same(gold_number, answer_number):
                return _OTHER_NUMBER
            if policy.question is None or _is_final(
                policy.question, gold_text, answer_text, gold_number, answer_number
            ):
                return _SAME_NUMBER
            return _NOT_FINAL
    return _structural(compare(gold, answer, UNDECIDED, policy))


def _structural(found: bool | None) -> Verdict | None:
    if found is None:
        return None
    return Verdict.of(found, "structure", "the same part by part" if found else "not the same form or value")


_EXACT = Verdict.of(True, "exact", "the same text")
_SAME_NUMBER = Verdict.of(True, "numeric", "the same number")
_OTHER_NUMBER = Verdict.of(False, "numeric", "another number")
_NOT_FINAL = Verdict.of(False, "numeric", "the same number, not in simplest form or not as asked")


def compare(gold: str, answer: str, leaves: Leaves, policy: Policy = DEFAULT) -> bool | None:
    """Returns whether two raw answers are the same, part by part; None if this depends on an expression that `leaves` does not
    decide."""
    if "box" not in answer and "box" not in gold:
        return _compare(gold, answer, leaves, policy)
    gold, answers = "; ".join(_boxes(gold)), _boxes(answer)
    form = read_answer(gold).form
    if isinstance(form, Compound) and form.kind in ("list", "set", "record"):
        answers = ["; ".join(answers)]
    # To a gold with one part, several boxes are the answer only if each of them is.
    return _all(_compare(gold, one, leaves, policy) for one in answers) if len(answers) <= _MAX_SET else False


def _compare(gold: str, answer: str, leaves: Leaves, policy: Policy) -> bool | None:
    if r"\approx" in gold:  # a gold that says that it is rounded
        gold = gold.replace(r"\approx", "=").strip().removeprefix("=")
    choices = read_choice(gold), read_choice(answer)
    if choices[0] and choices[1]:
        return _compare(choices[0][1], choices[1][1], leaves, policy) if choices[0][0] == choices[1][0] else False
    if choices[0]:
        letter, value = choices[0]
        return True if is_letter(letter, answer, any_case=True) else _compare(value, answer, leaves, policy)
    if choices[1]:
        letter, value = choices[1]
        return True if is_letter(letter, gold) else _compare(gold, value, leaves, policy)
    if (chosen := only_choice(gold)) and is_letter(chosen, answer, any_case=True):
        return True
    answer = without_option(answer)
    comparison = _Comparison(leaves, policy)
    found = comparison.answers(read_answer(gold), read_answer(answer))
    if found or (with_points := decimal_commas(gold)) is None:
        return found
    # In much of the world "3,5" is three and a half. A gold that may be a list of two has to be answered with a decimal.
    written = read_answer(decimal_commas(answer) or answer)
    if not is_surely_decimal(gold) and not _is_decimal(written.form):
        return found
    return _any([found, comparison.answers(read_answer(with_points), written)])


def _is_decimal(form: Form) -> bool:
    return isinstance(form, Scalar) and form.number is not None and form.number.decimal


def _is_final(question: str, gold_text: str, answer_text: str, gold: Number, answer: Number) -> bool:
    """Returns whether an answer that equals the gold number counts as an answer. It has to be in simplest form, unless the gold is
    not; and it must not merely repeat an expression that is written in the question, such as "1/2 + 1/3" in "compute 1/2 + 1/3"."""
    if answer.places is None and answer.value.denominator == 1 and answer.simplest:
        return True  # an integer has one spelling
    return (answer.simplest or not gold.simplest) and not repeats(question, answer_text, gold_text)


def _boxes(text: str) -> list[str]:
    """Returns the contents of the boxes that form the answer, each text once; the text itself if it has no box."""
    return list(dict.fromkeys(box.content for box in joined_boxes(text))) or [text]


class _Comparison:
    """Compares answers by their form, without algebra. The result is True, False, or None if that does not settle it, and the
    caller has to ask whether expressions are equal (`nmoe.grading.math.symbolic`)."""

    def __init__(self, leaves: Leaves, policy: Policy) -> None:
        self._leaves = leaves
        self._policy = policy

    def answers(self, gold: Answer, answer: Answer) -> bool | None:
        if gold.text == answer.text or sentence_case(gold.text) == sentence_case(answer.text):
            return True
        if same_words(gold.text, answer.text) or same_amounts(gold.text, answer.text):
            return True
        if (said := _YES_OR_NO.fullmatch(gold.text)) and answer.text.lower() == said[1].lower():
            return True
        answer = with_index_of(gold, answer)
        gold, answer = _only_value(gold, answer), _only_value(answer, gold)
        if not may_have_condition(gold, answer) or self._is_unsolved(gold, answer):
            return False
        if gold.label and answer.label:
            if gold.label == answer.label:
                return self.forms(gold.form, answer.form)
            letters = renamed_arguments(gold.label, answer.label)
            if letters is not None:
                renamed = with_names(answer.form, letters)
                return renamed is not None and self.forms(gold.form, renamed)
            return self.forms(gold.relation or gold.form, answer.relation or answer.form)
        if gold.label:
            equation = self.forms(gold.relation or gold.form, answer.form)
            return _any([equation, self.forms(gold.form, answer.form)]) if may_lose_label(gold) else equation
        if answer.label:
            equation = self.forms(gold.form, answer.relation or answer.form)
            labelled = answer.label not in text_of(answer.form)  # "x = x + 1" does not name a value
            return _any([equation, self.forms(gold.form, answer.form)]) if labelled else equation
        found = self.forms(gold.form, answer.form)
        if self._policy.question and (asked := asked_value(self._policy.question, answer.form)) is not None:
            found = _any([found, self.forms(gold.form, asked)])
        value = value_of(gold.form)
        return found if value is None else _any([found, self.forms(value, answer.form)])

    def _is_unsolved(self, gold: Answer, answer: Answer) -> bool:
        """Returns whether the answer is only an equation from the question, or any equation where the question asks for a
        number."""
        question = self._policy.question
        relation = answer.relation or answer.form
        if question is None or not isinstance(relation, Compound) or relation.kind != "relation":
            return False
        solved = isinstance(gold.form, Scalar) and gold.form.number is not None
        if solved and not answer.label and not wants_equation(question):
            return asked_value(question, relation) is None
        sides = [part.text for part in relation.parts if isinstance(part, Scalar)]
        golds = gold.relation or gold.form
        wanted = [part.text for part in golds.parts if isinstance(part, Scalar)] if isinstance(golds, Compound) else []
        return len(sides) == 2 and repeats_equation(question, sides, wanted)

    def forms(self, gold: Form, answer: Form) -> bool | None:
        gold, answer = _real_line(gold, answer), _real_line(answer, gold)
        gold, answer = _as_several(gold, answer), _as_several(answer, gold)
        if isinstance(gold, Scalar) or isinstance(answer, Scalar):
            both = isinstance(gold, Scalar) and isinstance(answer, Scalar)
            return self.scalars(gold, answer) if both else False  # type: ignore[arg-type]
        if (intervals := as_intervals(gold, answer)) is not None:
            gold, answer = intervals
        if "record" in (gold.kind, answer.kind):
            return self.records(gold, answer)
        if gold.kind == "union":
            return answer.kind == "union" and self.unordered(gold.parts, answer.parts)
        if gold.kind == "set" or (gold.kind == "list" and _lists_solutions(gold)):
            return answer.kind in ("set", "list") and self.same_set(gold.parts, answer.parts)
        if gold.kind == "list" and self._policy.answer_order == "any":
            return answer.kind in ("set", "list") and self.unordered(gold.parts, answer.parts)
        if gold.kind != answer.kind and (gold.kind, answer.kind) != ("list", "set"):
            return False
        if gold.kind == "relation":
            return self.relations(gold, answer)
        if gold.kind == "congruence" and gold.detail == answer.detail:
            of = self.ordered(gold.parts[:-1], answer.parts[:-1]) if len(answer.parts) > 1 else True
            return _all([of, self.residues(gold.parts[-1], answer.parts[-1], gold.detail)])
        if gold.detail != answer.detail and gold.kind != "list":
            return False
        return self.ordered(gold.parts, answer.parts)

    def records(self, gold: Compound, answer: Compound) -> bool | None:
        """Compares named values such as "x = 3, y = 4": by name if both answers have names, else in the gold's order."""
        if gold.kind == answer.kind:
            names, others = gold.detail.split("\n"), answer.detail.split("\n")
            if sorted(names) != sorted(others):
                return False
            return self.ordered(gold.parts, [answer.parts[others.index(name)] for name in names])
        named, other = (gold, answer) if gold.kind == "record" else (answer, gold)
        if named is answer and (other.kind == "set" or (other.kind == "list" and self._policy.answer_order == "any")):
            return self.unordered(other.parts, named.parts)
        if other.kind != "list" and (other.kind, other.detail) != ("brackets", "()"):
            return False
        return self.ordered(gold.parts, answer.parts)

    def ordered(self, gold: Sequence[Form], answer: Sequence[Form]) -> bool | None:
        if len(gold) != len(answer):
            return False
        return _all(self.forms(one, other) for one, other in zip(gold, answer, strict=True))

    def unordered(self, gold: Sequence[Form], answer: Sequence[Form]) -> bool | None:
        """Returns whether the parts of both sides can be paired up in any order. Greedy pairing suffices, because equality is
        transitive.
        """
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

    def same_set(self, gold: Sequence[Form], answer: Sequence[Form]) -> bool | None:
        """Returns whether each part of one side also occurs on the other side, however often."""
        if max(len(gold), len(answer)) > _MAX_SET:
            return False
        found = [[self.forms(part, other) for other in answer] for part in gold]
        return _all(map(_any, [*found, *zip(*found, strict=True)]))

    def residues(self, gold: Form, answer: Form, modulus: str) -> bool | None:
        """Returns whether two residues are equal; without a question, also if they differ by a multiple of the modulus."""
        found = self.forms(gold, answer)
        if found or self._policy.question is not None or not isinstance(gold, Scalar) or not isinstance(answer, Scalar):
            return found
        if not modulus.isdecimal() or not int(modulus) or gold.number is None or answer.number is None:
            return found
        return (gold.number.value - answer.number.value) % int(modulus) == 0

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
        if self._policy.question is not None and not all(is_worked_out(side, *sides[:2]) for side in sides[2:]):
            return False
        return self._leaves.equations((sides[0], sides[1]), (sides[2], sides[3]))

    def scalars(self, gold: Scalar, answer: Scalar) -> bool | None:
        if gold.base or answer.base:
            return answer.base in ("", gold.base) and gold.base != "" and gold.text == answer.text.lstrip("0").upper()
        question = self._policy.question
        if gold.number and answer.number and "%" in (gold.unit, answer.unit) and "" in (gold.unit, answer.unit):
            return self._percents(gold, answer)
        if question is not None and not answer.unit and (split := letter_unit(answer)) and self._may_add(split.unit):
            answer = split
        same_unit = answer.unit in ("", gold.unit) or {answer.unit, gold.unit} == {"$", "dollar"}
        if not same_unit and (gold.unit or not self._may_add(answer.unit)):
            return False
        if not answer.unit and changes_number(gold.unit) and gold.unit != "%":
            return False
        if gold.text == answer.text:
            return True
        if gold.number is not None and answer.number is not None:
            return self._numbers(gold, answer)
        if sentence_case(gold.text) == sentence_case(answer.text) or same_number_set(gold.text, answer.text):
            return True
        if question is not None and not self._answers(question, gold, answer):
            return False
        return self._leaves.expressions(gold.text, answer.text)

    def _numbers(self, gold: Scalar, answer: Scalar) -> bool:
        assert gold.number is not None
        assert answer.number is not None
        question = self._policy.question
        if not same(gold.number, answer.number):
            return False
        return question is None or _is_final(question, gold.text, answer.text, gold.number, answer.number)

    def _percents(self, gold: Scalar, answer: Scalar) -> bool:
        """Returns whether two numbers are the same, one of which has a percent sign and the other no unit."""
        assert gold.number is not None
        assert answer.number is not None
        question = self._policy.question
        if gold.unit == "%":
            hundredth = replace(gold, number=percent_value(gold.number))
            return self._numbers(gold, answer) or self._numbers(hundredth, answer)
        asked = question is not None and asks_percent(question)
        if asked and self._policy.units != "as_gold" and self._numbers(gold, answer):
            return True
        if question is not None and (not asked or abs(gold.number.value) >= 1):
            return False
        return answer.number.simplest and same(gold.number, percent_value(answer.number))

    @staticmethod
    def _answers(question: str, gold: Scalar, answer: Scalar) -> bool:
        """Returns whether an expression may answer the question: its arithmetic is done, it does not repeat the question, and
        it has the form that is asked for."""
        if gold.number is not None or (answer.number is not None and not answer.number.simplest):
            return False
        if not is_worked_out(answer.text, gold.text) or repeats(question, answer.text, gold.text):
            return False
        return is_as_asked(question, answer.text, gold.text)

    def _may_add(self, unit: str) -> bool:
        """Returns whether an answer may have this unit although the gold has none."""
        question = self._policy.question or ""
        asked = asked_units(question)
        # TeX puts dollar signs around numbers, and questions need not name dollars: "How much does she make every day?"
        if unit in ("$", "dollar"):
            return not asks_cents(question) and (unit == "$" or self._policy.units != "as_gold")
        if self._policy.units == "as_gold" or unit == "%":
            return False
        return unit in asked or (self._policy.units == "any" and not changes_number(unit))


def _real_line(form: Form, other: Form) -> Form:
    """Returns the set of real numbers as the interval (-inf, inf) if the other form is compound; any other form unchanged."""
    return REAL_LINE if isinstance(other, Compound) and form == Scalar(REALS, None) else form


def _lists_solutions(gold: Compound) -> bool:
    """Returns whether every part of a list or set is a solution with several values, such as (1, 2); such solutions have no
    order."""
    return all(isinstance(part, Compound) and part.kind in ("record", "brackets") for part in gold.parts)


def _only_value(one: Answer, other: Answer) -> Answer:
    """Returns the single value of an answer that is a set of one, if the other answer is a plain value; else the answer
    unchanged.
    """
    form = one.form
    if (
        not isinstance(form, Compound)
        or form.kind != "set"
        or len(form.parts) != 1
        or not isinstance(other.form, Scalar)
    ):
        return one
    value = form.parts[0]
    empty = Scalar(r"\emptyset", None)
    return replace(one, form=value) if isinstance(value, Scalar) and empty not in (value, other.form) else one


def _as_several(form: Form, other: Form) -> Form:
    """Returns a single solution as a set of one if the other form is a list or set of such solutions; else the form unchanged."""
    if not isinstance(other, Compound) or other.kind not in ("list", "set"):
        return form
    if isinstance(form, Compound) and form.kind in ("record", "brackets") and _lists_solutions(other):
        return Compound("set", (form,))
    return form


def _all(found: Iterable[bool | None]) -> bool | None:
    open_ = False
    for one in found:
        if one is False:
            return False
        open_ = open_ or one is None
    return None if open_ else True


def _any(found: Sequence[bool | None]) -> bool | None:
    return True if True in found else None if None in found else False
