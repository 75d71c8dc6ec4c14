"""The symbolic layer: two answers whose expressions math-verify reads and compares. Runs in a worker process.

Source: math-verify (github.com/huggingface/Math-Verify), whose parser and comparison this calls with the extraction left out, for
answers are extracted before, and with its own timeouts off. They raise SIGALRM, which fails off the main thread; here
the whole process is killed instead (`nmoe.rl.grading.workers`).

Its comparison is generous, so that both sides also have to agree in value: expressions without variables to 50 digits, others at
three points before math-verify is asked for a proof. Two wrong things are then caught that it lets pass: numbers that
differ after the fifteenth digit, and decimals that only look like 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mpmath
import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify.grader import verify

from nmoe.rl.grading import expressions
from nmoe.rl.grading.equivalence import compare
from nmoe.rl.grading.numbers import TOLERANCE

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_DIGITS = 50
# Rational, of both signs and with no small relation between them; the variables of an expression get them in turn.
_POINTS = [
    sympy.Rational(p, q) for p, q in ((97, 89), (-61, 83), (151, 71), (-37, 101), (59, 43), (-173, 107), (19, 67))
]


def equal(gold: str, answer: str, any_order: bool) -> bool:
    """Whether two raw answers are the same. May take for ever, or all memory."""
    return compare(gold, answer, MathVerify(), any_order=any_order) is True


class MathVerify:
    """Decides about expressions; see `nmoe.rl.grading.equivalence.Leaves`."""

    def expressions(self, gold: str, answer: str) -> bool:
        if not expressions.comparable(gold, answer):
            return False
        parsed = _parse_all(gold, answer)
        return parsed is not None and _holds(lambda: _equal(parsed[0], parsed[1], "." in gold + answer))

    def equations(self, gold: tuple[str, str], answer: tuple[str, str]) -> bool:
        """Whether left less right of one is a constant times that of the other, and neither is 0 for all values."""
        if not expressions.comparable("=".join(gold), "=".join(answer)):
            return False
        sides = _parse_all(*gold, *answer)
        if sides is None:
            return False
        return _holds(lambda: _proportional(sides[0] - sides[1], sides[2] - sides[3]))


def _holds(question: Callable[[], bool]) -> bool:
    """The answer to a question about what a policy wrote; no, where sympy fails on it in one of its many ways. Memory and stack
    that run out are the worker's to report."""
    try:
        return question()
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return False


def _proportional(gold: Any, answer: Any) -> bool:
    symbols = _symbols(gold, answer)
    point = dict(zip(symbols, _POINTS, strict=False))
    scales = gold.subs(point), answer.subs(point)
    if not symbols or any(_is_zero(scale) for scale in scales):
        return False
    return _equal(gold * scales[1], answer * scales[0], rounded=False)


def _parse_all(*texts: str) -> list[Any] | None:
    """Every text as a sympy expression; None where one is none. Variables are real unless the imaginary unit is there."""
    is_real = not any("i" in expressions.letters(text) for text in texts)
    parsed = [_parse(text, is_real) for text in texts]
    return None if any(expression is None for expression in parsed) else parsed


@lru_cache(256)
def _parse(text: str, is_real: bool) -> Any:
    """A sympy expression; None for a text that is none, or that parses to something else (a set, a relation)."""
    source = expressions.latex(text)
    if source is None:
        return None
    try:
        parsed = latex2sympy(
            normalize_latex(source, _NORMALIZATION), is_real=is_real, convert_degrees=False, normalization_config=None
        )
    except Exception:  # the parser raises a bare Exception for what it does not understand
        return None
    if not isinstance(parsed, sympy.Expr):
        return None
    imaginary = [symbol for symbol in parsed.free_symbols if str(symbol) == "i"]
    return parsed.subs(dict.fromkeys(imaginary, sympy.I))


def _equal(gold: Any, answer: Any, rounded: bool) -> bool:
    symbols = _symbols(gold, answer)
    if len(symbols) > len(_POINTS):
        return False
    if not symbols:
        return _agree(_value(gold), _value(answer), rounded)
    compared = 0
    for shift in range(3):
        points = [_POINTS[(place + 3 * shift) % len(_POINTS)] for place in range(len(symbols))]
        point = dict(zip(symbols, points, strict=True))
        values = [_value(expression.subs(point)) for expression in (gold, answer)]
        if (values[0] is None) != (values[1] is None):
            return False
        if values[0] is not None:
            if not _agree(values[0], values[1], rounded):
                return False
            compared += 1
    return compared > 1 and (rounded or bool(verify(gold, answer, timeout_seconds=None)))


def _symbols(*parsed: Any) -> Sequence[Any]:
    return sorted(set().union(*(expression.free_symbols for expression in parsed)), key=str)


def _value(expression: Any) -> Any:
    """The value to 50 digits as a complex number; None where there is no finite one."""
    value = expression.evalf(_DIGITS)
    if not value.is_number or not value.is_finite:
        return None
    real, imaginary = value.as_real_imag()
    with mpmath.workdps(_DIGITS):
        return mpmath.mpc(mpmath.mpf(str(real)), mpmath.mpf(str(imaginary)))


def _agree(gold: Any, answer: Any, rounded: bool) -> bool:
    if gold is None or answer is None:
        return False
    with mpmath.workdps(_DIGITS):
        size = abs(gold)
        allowed = (
            mpmath.mpf(float(TOLERANCE)) * min(1, size) if rounded else mpmath.mpf(10) ** -40 * max(size, abs(answer))
        )
        return bool(abs(gold - answer) <= allowed)


def _is_zero(value: Any) -> bool:
    number = _value(value)
    return number is None or abs(number) < mpmath.mpf(10) ** -40
