"""The symbolic layer: compares two answers whose expressions math-verify parses. Runs in a worker process.

It calls the parser and comparison of math-verify (github.com/huggingface/Math-Verify). math-verify's extraction is not used,
because the answers are already extracted. Its timeouts are off: they raise SIGALRM, which fails outside the main thread; here
the whole process is killed instead (`nmoe.grading.workers.pool`).

math-verify's comparison is generous, so both sides must also agree in value before it is asked for a proof. Expressions
without variables are compared exactly if they are rational, else to 50 digits beyond the size of everything in them; others
are compared so at points. This catches errors that math-verify accepts: numbers that differ after the fifteenth digit,
2^{2017} for 2^{2017}-1, and decimals that only look like 0. Decimals are the fractions that they are written as. Only one that
is an answer as a whole may be a rounded value (`nmoe.grading.math.numbers.same`): in a function every coefficient counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, _Latex2Sympy, normalize_latex
from math_verify.grader import verify

from nmoe.grading.math import expressions
from nmoe.grading.math.equivalence import compare
from nmoe.grading.math.numbers import Number, read_number, same
from nmoe.grading.math.question import AnswerOrder, Policy, Units

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_DIGITS = 50
_PRECISION = mpmath.mpf(10) ** -40
# Larger numbers are compared exactly or not at all.
_MAX_DIGITS = 10_000
_DIGITS_PER_BIT = 0.302
# Values for variables, taken in turn: rational, of both signs, with no simple relation between them.
_POINTS = [
    sympy.Rational(p, q) for p, q in ((97, 89), (-61, 83), (151, 71), (-37, 101), (59, 43), (-173, 107), (19, 67))
]


def equal(
    gold: str, answer: str, answer_order: AnswerOrder = "any", units: Units = "asked", question: str | None = None
) -> bool:
    """Returns whether two raw answers are equal under a policy. May take any amount of time or memory."""
    return compare(gold, answer, MathVerify(), Policy(answer_order, units, question)) is True


class _Parser(_Latex2Sympy):
    """math-verify's parser, but creating integers directly.

    The original passes each one to sympy as text, which sympy compiles as Python in 0.4 ms, a third of the time for a short
    expression.
    """

    def parse_number(self, text: str) -> Any:
        return sympy.Integer(int(text)) if text.isdecimal() else super().parse_number(text)


def warm_up() -> None:
    """Parses and compares one expression of every kind, because the first of a kind takes ten times as long as later ones, until
    the parser and sympy have cached their tables.

    Raises RuntimeError if no pair is found equal. A parser that fails on everything, for example with incompatible packages,
    would otherwise silently make every answer wrong.
    """
    found = [equal(gold, answer) for gold, answer in WARM_UP]
    if not any(found):
        raise RuntimeError("math-verify finds nothing equal: are its packages the versions of constraints.txt?")


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
    """Compares expressions with math-verify; see `nmoe.grading.math.equivalence.Leaves`."""

    def expressions(self, gold: str, answer: str) -> bool:
        if not expressions.comparable(gold, answer):
            return False
        sources = expressions.both_latex(gold, answer)
        parsed = None if sources is None else _parse_all(*sources)
        if parsed is None:
            return False
        numbers = [read_number(text) for text in (gold, answer)]
        decimals = [number is not None and number.decimal for number in numbers]
        if any(decimals) and not any(one.free_symbols for one in parsed):
            return _holds(lambda: _is_rounded(parsed, numbers))
        return _holds(lambda: _equal(parsed[0], parsed[1]))

    def equations(self, gold: tuple[str, str], answer: tuple[str, str]) -> bool:
        """Returns whether left minus right is the same for both equations up to a constant factor, and 0 everywhere for neither."""
        if not expressions.comparable("=".join(gold), "=".join(answer)):
            return False
        sources = [expressions.latex(side) for side in (*gold, *answer)]
        sides = _parse_all(*(source for source in sources if source is not None))
        if sides is None or None in sources:
            return False
        return _holds(lambda: _proportional(sides[0] - sides[1], sides[2] - sides[3]))


def _holds(question: Callable[[], bool]) -> bool:
    """Returns the result of a comparison, or False if sympy fails on the policy's output in one of its many ways.

    Running out of memory or stack is left to the worker to report.
    """
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
    return _equal(gold * scales[1], answer * scales[0])


def _parse_all(*sources: str) -> list[Any] | None:
    """Parses every text to a sympy expression; None if a text is not an expression. Variables are real unless the imaginary unit
    occurs.
    """
    is_real = not any("i" in expressions.letters(source) for source in sources)
    parsed = [_parse(source, is_real) for source in sources]
    return None if any(expression is None for expression in parsed) else parsed


@lru_cache(256)
def _parse(source: str, is_real: bool) -> Any:
    """Parses a text to a sympy expression; None for a text that is not one, or that denotes something else (a set, a relation)."""
    try:
        parsed = _Parser(is_real=is_real, config=_CONVERSION).parse(normalize_latex(source, _NORMALIZATION))
    except Exception:  # the parser raises a bare Exception for unknown input
        return None
    if not isinstance(parsed, sympy.Expr):
        return None
    imaginary = [symbol for symbol in parsed.free_symbols if str(symbol) == "i"]
    return parsed.subs(dict.fromkeys(imaginary, sympy.I))


def _is_rounded(parsed: list[Any], numbers: list[Number | None]) -> bool:
    """Returns whether two values are the same, where at least one is a decimal and may be rounded."""
    read = [_exact(value) if number is None else number for value, number in zip(parsed, numbers, strict=True)]
    return read[0] is not None and read[1] is not None and same(read[0], read[1])


def _exact(expression: Any) -> Number | None:
    """Returns the value of an expression to all digits that a comparison with a decimal needs; None if it has no real value."""
    value = _value(expression)
    if value is None or (isinstance(value, mpmath.mpc) and value.imag != 0):
        return None
    with mpmath.workdps(_DIGITS):
        return Number(Fraction(mpmath.nstr(value.real, _DIGITS)))


def _equal(gold: Any, answer: Any) -> bool:
    if gold == answer:
        return bool(gold.is_finite is not False)
    symbols = _symbols(gold, answer)
    if len(symbols) > len(_POINTS):
        return False
    if not symbols:
        return _same_value(gold, answer)
    for shift in range(len(_POINTS)):
        points = [_POINTS[(index + shift) % len(_POINTS)] for index in range(len(symbols))]
        point = dict(zip(symbols, points, strict=True))
        values = gold.xreplace(point), answer.xreplace(point)
        has_value = [_value(value, 15) is not None for value in values]
        if has_value[0] != has_value[1]:
            return False
        if has_value[0]:
            return _same_value(*values) and bool(verify(gold, answer, timeout_seconds=None))
    return False


def _symbols(*parsed: Any) -> Sequence[Any]:
    return sorted(set().union(*(expression.free_symbols for expression in parsed)), key=str)


def _same_value(gold: Any, answer: Any) -> bool:
    """Returns whether two expressions without variables have the same value: rational ones are compared exactly, others to more
    digits than any number in them has."""
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    reach = max(_reach(gold), _reach(answer))
    digits = _DIGITS + 2 * reach
    if digits > _MAX_DIGITS:
        return False
    values = _value(gold, digits), _value(answer, digits)
    if values[0] is None or values[1] is None:
        return False
    with mpmath.workdps(digits):
        allowed = _PRECISION / mpmath.mpf(10) ** reach * min(1, max(abs(values[0]), abs(values[1])))
        return bool(abs(values[0] - values[1]) <= allowed)


def _reach(expression: Any) -> int:
    """Returns the largest number of decimal digits that any part of an expression without variables needs: digits of numerator and
    denominator of a rational number, and of the power of ten of a computed value (5 for 12345, 3 for 0.004)."""
    reach = 0
    for part in sympy.preorder_traversal(expression):
        if part.is_Rational:
            reach = max(reach, int(max(part.p.bit_length(), part.q.bit_length()) * _DIGITS_PER_BIT))
        elif part.is_Pow or part.is_Function:
            value = _value(part, 15)
            reach = max(reach, abs(int(mpmath.log10(abs(value)))) + 1 if value else 0)
    return reach


def _value(expression: Any, digits: int = _DIGITS) -> Any:
    """Evaluates an expression without variables to a complex number with this many digits; None if the value is not finite."""
    value = expression.evalf(digits, maxn=2 * digits)
    if value.is_Float:
        return mpmath.mp.make_mpf(value._mpf_)
    if not value.is_number or not value.is_finite:
        return None
    with mpmath.workdps(digits):
        return mpmath.mpc(*(mpmath.mpf(str(part)) for part in value.as_real_imag()))


def _is_zero(value: Any) -> bool:
    number = _value(value)
    return number is None or abs(number) < _PRECISION
