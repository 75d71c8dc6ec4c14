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
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, _Latex2Sympy, normalize_latex
from math_verify.grader import verify

from nmoe.rl.grading import expressions
from nmoe.rl.grading.equivalence import compare
from nmoe.rl.grading.numbers import TOLERANCE

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_DIGITS = 50
_PRECISION, _ROUNDING = mpmath.mpf(10) ** -40, mpmath.mpf(float(TOLERANCE))
# Rational, of both signs and with no small relation between them; the variables of an expression get them in turn.
_POINTS = [
    sympy.Rational(p, q) for p, q in ((97, 89), (-61, 83), (151, 71), (-37, 101), (59, 43), (-173, 107), (19, 67))
]


def equal(gold: str, answer: str, any_order: bool) -> bool:
    """Whether two raw answers are the same. May take for ever, or all memory."""
    return compare(gold, answer, MathVerify(), any_order=any_order) is True


class _Parser(_Latex2Sympy):
    """math-verify's, with integers made at once: it hands each to sympy as a text, which compiles it as Python for 0.4 ms, a
    third of the time that a short expression takes."""

    def parse_number(self, text: str) -> Any:
        return sympy.Integer(int(text)) if text.isdecimal() else super().parse_number(text)


def warm_up() -> None:
    """Reads and compares forms of every kind once: parser and sympy keep what they found out about their own tables, and the first
    expression of a kind takes ten times as long as those after it.

    Raises RuntimeError where no pair is found equal: a parser that fails on everything, as with packages that do not fit one
    another, would else make every answer wrong without a word."""
    found = [equal(*pair, False) for pair in WARM_UP]
    if not any(found):
        raise RuntimeError("math-verify finds nothing equal: are its packages those of constraints.txt?")


WARM_UP = [
    (r"\frac{2x^2-1}{x+1}+\sqrt{3}", r"\sqrt{3}+(2x^2-1)/(x+1)"),
    (r"(x+1)(y-2)", "xy-2x+y-2"),
    (r"\sin^2 x+\cos(2x)+\tan\frac{\pi}{4}", r"1-\sin(x)^2+\cos^2 x"),
    (r"3\ln 2+\log_2 x+e^{2x}", r"\ln 8+\log_2 x+e^{x}e^{x}"),
    (r"(2+3i)a_1", r"3ia_{1}+2a_1"),
    (r"\binom{5}{2}\cdot n!-|x|", r"10\times n!-|x|"),
    (r"\sqrt[3]{2}\alpha-0.5", r"2^{\frac{1}{3}}\alpha-\frac{1}{2}"),
    ("y=2x+1", "2y=4x+2"),
    ("7", r"\sqrt{49}"),
]


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
        parsed = _Parser(is_real=is_real, config=_CONVERSION).parse(normalize_latex(source, _NORMALIZATION))
    except Exception:  # the parser raises a bare Exception for what it does not understand
        return None
    if not isinstance(parsed, sympy.Expr):
        return None
    imaginary = [symbol for symbol in parsed.free_symbols if str(symbol) == "i"]
    return parsed.subs(dict.fromkeys(imaginary, sympy.I))


def _equal(gold: Any, answer: Any, rounded: bool) -> bool:
    if gold == answer:
        return bool(gold.is_finite is not False)
    symbols = _symbols(gold, answer)
    if len(symbols) > len(_POINTS):
        return False
    if not symbols:
        return _agree(_value(gold), _value(answer), rounded)
    # Where decimals leave no proof, points have to do.
    wanted, compared = (3 if rounded else 1), 0
    for shift in range(len(_POINTS)):
        points = [_POINTS[(place + shift) % len(_POINTS)] for place in range(len(symbols))]
        point = dict(zip(symbols, points, strict=True))
        values = _value(gold.xreplace(point)), _value(answer.xreplace(point))
        if (values[0] is None) != (values[1] is None):
            return False
        if values[0] is not None:
            if not _agree(*values, rounded):
                return False
            compared += 1
            if compared == wanted:
                return rounded or bool(verify(gold, answer, timeout_seconds=None))
    return False


def _symbols(*parsed: Any) -> Sequence[Any]:
    return sorted(set().union(*(expression.free_symbols for expression in parsed)), key=str)


def _value(expression: Any) -> Any:
    """The value to 50 digits as a complex number; None where there is no finite one."""
    value = expression.evalf(_DIGITS)
    if value.is_Float:
        return mpmath.mp.make_mpf(value._mpf_)
    if not value.is_number or not value.is_finite:
        return None
    with mpmath.workdps(_DIGITS):
        return mpmath.mpc(*(mpmath.mpf(str(part)) for part in value.as_real_imag()))


def _agree(gold: Any, answer: Any, rounded: bool) -> bool:
    if gold is None or answer is None:
        return False
    with mpmath.workdps(_DIGITS):
        size = abs(gold)
        allowed = _ROUNDING * min(1, size) if rounded else _PRECISION * max(size, abs(answer))
        return bool(abs(gold - answer) <= allowed)


def _is_zero(value: Any) -> bool:
    number = _value(value)
    return number is None or abs(number) < _PRECISION
