"""Finds in microseconds that two expressions cannot be equal: their values at a point differ by far more than rounding could.

Most wrong answers end here and never reach a worker process. It reads only expressions with a single reading (sums, products,
powers and absolute values of numbers and letters, by `nmoe.grading.math.shape`) and decides nothing about others.
"""

from __future__ import annotations

import math
import re

from nmoe.grading.math.shape import Shape, shape

# More than the tolerance of decimals, and far more than the rounding of a few hundred operations.
_FAR = 1e-5
# "1\frac{1}{2}" may be a mixed number.
_MIXED = re.compile(r"[0-9] ?\\frac")
_LARGEST = 1e100


class _NoValueError(Exception):
    pass


def differ(gold: str, answer: str) -> bool:
    """Whether the values of two normalised texts certainly differ."""
    values = _value(gold, 0), _value(answer, 0)
    return values[0] is not None and values[1] is not None and _far(*values)  # type: ignore[arg-type]


def equations_differ(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    """Whether two equations, given by their sides, are certainly not multiples of one another."""
    found = []
    for point in (0, 1):
        for left, right in (gold, answer):
            sides = _value(left, point), _value(right, point)
            if sides[0] is None or sides[1] is None:
                return False
            found.append(sides[0] - sides[1])
            # The difference of large numbers may be all rounding.
            if abs(found[-1]) < 1e-6 * max(abs(sides[0]), abs(sides[1])):
                return False
    return _far(found[0] * found[3], found[1] * found[2])


def _far(one: float, other: float) -> bool:
    return abs(one - other) > _FAR * max(abs(one), abs(other)) > 0


def _value(text: str, point: int) -> float | None:
    if _MIXED.search(text):
        return None
    read = shape(text)
    if read is None:
        return None
    try:
        return _evaluate(read, point)
    except (_NoValueError, OverflowError, ZeroDivisionError):
        return None


def _evaluate(one: Shape, point: int) -> float:
    if isinstance(one, str):
        if one in ("i", "I", r"\infty"):
            raise _NoValueError
        # Positive, so that roots and powers have a single real value.
        known = {"e": math.e, r"\pi": math.pi}
        found = known.get(one) or 0.3 + math.modf(sum(map(ord, one)) * (0.6180339887 + 0.1 * point))[0]
    elif not isinstance(one, tuple):
        found = float(one)
    elif one[0] == "+":
        terms = [_evaluate(part, point) for part in one[1:]]
        found = math.fsum(terms)
        if abs(found) < 1e-6 * max(map(abs, terms)):
            raise _NoValueError  # the terms cancelled, so the rest may be all rounding
    elif one[0] == "*":
        found = math.prod(_evaluate(part, point) for part in one[1:])
    elif one[0] == "^":
        base, exponent = _evaluate(one[1], point), _evaluate(one[2], point)
        if base <= 0 and exponent != int(exponent):
            raise _NoValueError
        found = base**exponent
    elif one[0] == "abs":
        found = abs(_evaluate(one[1], point))
    else:
        raise _NoValueError
    if not abs(found) < _LARGEST or (0 < abs(found) < 1 / _LARGEST):
        raise _NoValueError
    return found
