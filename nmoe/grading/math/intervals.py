r"""Intervals, written with brackets or as inequalities: "(5, \infty)", "x > 5", "x \ne 5", and the real line."""

from __future__ import annotations

import re

from nmoe.grading.math.forms import Compound, Form, without_points
from nmoe.grading.math.units import Scalar

_ENDS = (Scalar(r"-\infty", None), Scalar(r"\infty", None))
REAL_LINE = Compound("brackets", _ENDS, "()")


def as_intervals(gold: Compound, answer: Compound) -> tuple[Compound, Compound] | None:
    """Converts both forms to intervals if one is written with brackets and the other as inequalities; else None.

    The gold must certainly be an interval: "(1, 2)" may be a point.
    """
    if {"relation", "set", "list"} & {answer.kind, gold.kind}:
        gold_interval, answer_interval = _as_interval(gold), _as_interval(answer)
        if gold_interval is None or answer_interval is None or gold.kind == answer.kind:
            return None
        if gold.kind == "brackets" and gold.detail == "()" and not set(_ENDS) & set(gold.parts):
            return None
        return gold_interval, answer_interval
    return None


def _as_interval(form: Compound) -> Compound | None:
    if form.kind == "difference":
        return form
    if (points := _excluded(form)) is not None:
        found = without_points(points)
        return found if isinstance(found, Compound) else None
    if form.kind == "brackets":
        return form if len(form.parts) == 2 and form.detail in ("()", "(]", "[)", "[]") else None
    if form.kind == "list":
        return _between(form)
    if form.kind in ("union", "set"):
        parts = [_as_interval(part) for part in form.parts if isinstance(part, Compound)]
        if len(parts) != len(form.parts) or None in parts or len(_variables(form)) > 1:
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


def _excluded(form: Compound) -> Compound | None:
    r"""Returns the points that "x \ne 1" or "x \ne 1, x \ne 3" excludes from the real numbers; None for any other form."""
    relations = form.parts if form.kind == "list" else (form,)
    points: list[Form] = []
    for one in relations:
        if not isinstance(one, Compound) or (one.kind, one.detail) != ("relation", r"\ne") or len(one.parts) != 2:
            return None
        name, point = one.parts if _is_variable(one.parts[0]) else one.parts[::-1]
        if not points:
            variable = name
        if not _is_variable(name) or name != variable:
            return None
        points += point.parts if isinstance(point, Compound) and point.kind == "set" else [point]
    return Compound("set", tuple(points))


def _is_relation(form: Form) -> bool:
    return isinstance(form, Compound) and form.kind == "relation"


def _between(form: Compound) -> Compound | None:
    """Returns the interval of "x > 1 and x < 4", or the union of intervals of "x < 1, x > 4"; None for other lists."""
    if len(form.parts) != 2 or len(_variables(form)) != 1 or not all(map(_is_relation, form.parts)):
        return None
    halves = [_as_interval(part) for part in form.parts if isinstance(part, Compound)]
    for low, high in (halves, halves[::-1]):
        if low is None or high is None or low.parts[1] != _ENDS[1] or high.parts[0] != _ENDS[0]:
            continue
        least, most = low.parts[0], high.parts[1]
        if not isinstance(least, Scalar) or not isinstance(most, Scalar) or not least.number or not most.number:
            return None
        if least.number.value < most.number.value:
            return Compound("brackets", (least, most), low.detail[0] + high.detail[1])
        return Compound("union", (high, low))
    return None


def _variables(form: Form) -> set[str]:
    """Returns the variables that inequalities bound: the middle side, or the side that is a letter."""
    if not isinstance(form, Compound):
        return set()
    if form.kind != "relation":
        return set[str]().union(*map(_variables, form.parts))
    sides = form.parts[1:2] if len(form.parts) == 3 else form.parts
    return {side.text for side in sides if isinstance(side, Scalar) and _is_variable(side)}


def _is_variable(form: Form) -> bool:
    return isinstance(form, Scalar) and re.fullmatch(r"[A-Za-z]|\\(?:theta|alpha|lambda)", form.text) is not None
