r"""Labels of an answer: parts that another answer may omit, write otherwise or add.

The letter of a choice: "\text{(B)}\ 12", "Option B". The name of a value: "x = 5". The condition on an index: "k\pi, k \in Z".
"""

from __future__ import annotations

import re
from dataclasses import replace

from nmoe.grading.math import expressions
from nmoe.grading.math.forms import Answer, Compound, Form
from nmoe.grading.math.names import names_a_term, rename
from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.question import repeats, repeats_equation, wants_equation
from nmoe.grading.math.units import Scalar

# A choice has its own sign around or after its letter, and something between it and its value.
_CHOICE = re.compile(
    r"\s*(?:\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*(?:\(([A-J])\)|([A-J])[.):])\s*\}(?:\s|\\[ ,;:]|\\q?quad|~)*"
    r"|(?:\(([A-J])\)|([A-J])[.):])(?:\s|\\[ ,;:]|\\q?quad|~)+)(?![A-J]\s*$)(\S.*)",
    re.DOTALL,
)
_ONLY = re.compile(r"\s*\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*\(([A-J])\)\s*\}\s*")
_OPTION = re.compile(r"(?:\\text\s*\{)?\s*(?:option|choice|answer)\s*:?\s+(\(?[A-J]\)?)\s*\}?", re.IGNORECASE)
_INDEX = re.compile(r"([a-z])\\in ?(?:\\mathbb\{[NZ]\}|[NZ])(?:[_^](?:[*+]|\{[*+]\}))?")


def read_choice(text: str) -> tuple[str, str] | None:
    r"""Splits "\text{(B)} 12" or "B. 12" into the letter of the choice and its value; None for any other raw text."""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    *letters, value = match.groups()
    return next(letter for letter in letters if letter), value


def only_choice(text: str) -> str | None:
    r"""Returns the letter of "\text{(B)}", which is certainly a choice; None for any other raw text."""
    match = _ONLY.fullmatch(text)
    return match[1] if match else None


def is_letter(letter: str, text: str, any_case: bool = False) -> bool:
    """Returns whether a text consists of this letter of a choice, with or without brackets or the word "option"."""
    said = normalize(without_option(text)).strip("().: ")
    return (said.upper() if any_case else said) == letter


def without_option(text: str) -> str:
    """Returns the letter of "Option B"; any other raw text unchanged."""
    option = _OPTION.fullmatch(text)
    return option[1] if option else text


def asked_value(question: str, form: Form) -> Form | None:
    """Returns the number that an answer assigns to an expression of the question that has letters, such as 7 in "x + y = 7"; None
    for another form.
    """
    if not isinstance(form, Compound) or (form.kind, form.detail) != ("relation", "=") or len(form.parts) != 2:
        return None
    left, right = form.parts
    named = isinstance(left, Scalar) and left.number is None and expressions.letters(left.text)
    valued = isinstance(right, Scalar) and right.number is not None
    if not named or not valued or wants_equation(question) or not repeats(question, left.text, ""):  # type: ignore[union-attr]
        return None
    return None if repeats_equation(question, [left.text, right.text], []) else right  # type: ignore[union-attr]


def with_index_of(gold: Answer, answer: Answer) -> Answer:
    r"""Renames the index of a general solution to the gold's, if both run over the same set: "n\pi, n \in Z" for "k\pi, k \in
    Z".
    """
    indices = _INDEX.fullmatch(gold.condition), _INDEX.fullmatch(answer.condition)
    if indices[0] is None or indices[1] is None or gold.condition[1:] != answer.condition[1:]:
        return answer
    renamed = with_names(answer.form, {indices[1][1]: indices[0][1]})
    return answer if renamed is None else replace(answer, form=renamed, condition=gold.condition)


def may_have_condition(gold: Answer, answer: Answer) -> bool:
    """Returns whether the answer's condition on an index is absent, equals the gold's, or, if the gold has none, only says that
    an index in the answer is an integer or a natural number."""
    if answer.condition in ("", gold.condition):
        return True
    index = _INDEX.fullmatch(answer.condition)
    return not gold.condition and index is not None and index[1] in expressions.letters(text_of(answer.form))


def may_lose_label(gold: Answer) -> bool:
    """Returns whether the answer may omit the gold's label, such as "x = " in "x = 5".

    It may if the label names a function, a sequence or a member of a set, if the value has no letters, or if it does not contain x,
    y or z and the label is not y: "y = 2x" without "y =" is no equation.
    """
    in_set = isinstance(gold.relation, Compound) and gold.relation.detail == r"\in"
    letters = expressions.letters(text_of(gold.form)) - {"e", "i"}
    named = gold.label != "y" and not letters & {"x", "y", "z"}
    return "(" in gold.label or in_set or names_a_term(gold.label) or not letters or named


def value_of(gold: Form) -> Form | None:
    """Returns the value that a gold assigns to an expression other than a name: 11 in "a + b = 11".

    None for equations in x, y and z, which are curves.
    """
    if not isinstance(gold, Compound) or gold.kind != "relation" or gold.detail != "=" or len(gold.parts) != 2:
        return None
    left, right = (expressions.letters(text_of(part)) for part in gold.parts)
    return gold.parts[1] if left and not left & {"x", "y", "z"} and not right - {"e", "i"} else None


def with_names(form: Form, letters: dict[str, str]) -> Form | None:
    """Returns the form with its variables renamed; None if a new name is already in use."""
    if isinstance(form, Scalar):
        text = rename(form.text, letters)
        return None if text is None else replace(form, text=text)
    parts = [with_names(part, letters) for part in form.parts]
    found = tuple(part for part in parts if part is not None)
    return replace(form, parts=found) if len(found) == len(parts) else None


def text_of(form: Form) -> str:
    return form.text if isinstance(form, Scalar) else " ".join(map(text_of, form.parts))
