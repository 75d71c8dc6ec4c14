r"""The shape of an expression: its structure, without parts that change nothing, and without evaluating anything.

    \sqrt{180}, {\sqrt{180}}, 1\sqrt{180}+0, 180^{1/2}      one shape
    9y^2-30y+25, 25+9y^{2}-30 y                             one shape
    6\sqrt{5}, \sqrt{180}                                   two shapes, although the value is the same

A shape is a number, a letter, or a tuple of an operation and shapes. Sums and products are sorted, and numbers in a sum are
added up. The input is text normalised by `nmoe.grading.math.normalization`; the parser is a recursive descent of bounded
depth.

Values of shapes show in microseconds that two expressions cannot be equal: at a point they differ by far more than rounding could
explain. Most wrong answers end here and never reach a worker process. Only expressions with a single reading are evaluated (sums,
products, powers and absolute values of numbers and letters).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from nmoe.grading.math.expressions import FUNCTIONS, GREEK
from nmoe.grading.math.normalization import normalize

Shape = Any  # Fraction | str | tuple[str, Shape, ...]

_MAX_DEPTH = 30
# Longer expressions are compared as texts and by the symbolic layer only.
_MAX_TOKENS = 400
_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|\\(?P<command>[A-Za-z]+)|(?P<letter>[A-Za-z])|(?P<sign>[-+*/^_(){}\[\]|!])| "
)
_SYMBOLS = {"pi", "infty", *GREEK}
_WORDS = re.compile(r"(?<![A-Za-z\\])(sqrt|pi|" + "|".join(FUNCTIONS) + r")(?![A-Za-z])")
_CLOSED_BY = {"(": ")", "[": "]", "{": "}"}
_TIMES = ("cdot", "times")
_ENDS = {"+", "-", ")", "]", "}", "|", "^", "_", "!", r"\rfloor", r"\rceil"}
_ROUNDINGS = {"lfloor": r"\rfloor", "lceil": r"\rceil"}


@lru_cache(4096)
def shape(text: str) -> Shape | None:
    """Returns the shape of a text, its structure as an expression; None if it is not an expression."""
    return Parser(text).read()


def is_atom(one: Shape) -> bool:
    """Returns whether a shape is a number or a letter."""
    return not isinstance(one, tuple)


def parts(one: Shape) -> Iterator[Shape]:
    """Yields a shape and all shapes inside it, except numbers and letters."""
    if isinstance(one, tuple):
        yield one
        for part in one[1:]:
            yield from parts(part)


def add(terms: list[Shape]) -> Shape:
    flat = [part for term in terms for part in (term[1:] if isinstance(term, tuple) and term[0] == "+" else [term])]
    number = sum((term for term in flat if isinstance(term, Fraction)), Fraction(0))
    others = [term for term in flat if not isinstance(term, Fraction)]
    others = _without_pairs(others, lambda term: multiply([Fraction(-1), term]))
    if number or not others:
        others.append(number)
    return others[0] if len(others) == 1 else ("+", *sorted(others, key=repr))


def multiply(factors: list[Shape]) -> Shape:
    flat = [part for one in factors for part in (one[1:] if isinstance(one, tuple) and one[0] == "*" else [one])]
    if Fraction(0) in flat:
        return Fraction(0)
    flat = _without_pairs(flat, lambda one: power(one, Fraction(-1)))
    sign = -1 if sum(isinstance(one, Fraction) and one < 0 for one in flat) % 2 else 1
    kept = [abs(one) if isinstance(one, Fraction) else one for one in flat]
    kept = [one for one in kept if one != 1]
    if not kept:
        return Fraction(sign)
    numbers = [index for index, one in enumerate(kept) if isinstance(one, Fraction)]
    if numbers:
        kept[numbers[0]] *= sign
    elif sign < 0:
        kept.append(Fraction(-1))
    return kept[0] if len(kept) == 1 else ("*", *sorted(kept, key=repr))


def _without_pairs(items: list[Shape], inverse: Callable[[Shape], Shape]) -> list[Shape]:
    """Returns the items without pairs that cancel each other."""
    left = Counter(items)
    for one in items:
        if left[one] and left[other := inverse(one)] and other != one:
            left[one] -= 1
            left[other] -= 1
    kept = []
    for one in reversed(items):
        if left[one]:
            left[one] -= 1
            kept.append(one)
    return kept[::-1]


def power(base: Shape, exponent: Shape) -> Shape:
    if exponent == 1 or base == 1:
        return base
    if isinstance(base, tuple) and base[0] == "^" and exponent == -1 and base[2] == -1:
        return base[1]
    return ("^", base, exponent)


class _NoExpressionError(Exception):
    pass


class Parser:
    """Parses a text to a shape. Each operation found calls a method (`added`, `raised`, ...), which a subclass can override."""

    def __init__(self, text: str) -> None:
        source = _WORDS.sub(r"\\\1 ", normalize(text).replace("**", "^"))
        tokens = list(_TOKEN.finditer(source))
        whole = sum(len(token.group()) for token in tokens) == len(source)
        self._is_readable = 0 < len(tokens) <= _MAX_TOKENS and whole
        self._tokens = [token for token in tokens if token.group() != " "]
        self._position = 0

    def read(self) -> Shape | None:
        """Returns the shape of the text; None if it is not an expression."""
        if not self._is_readable:
            return None
        try:
            found = self.sum(0)
        except _NoExpressionError:
            return None
        return found if self.token is None else None

    def added(self, terms: list[Shape]) -> Shape:
        """Returns the shape of a sum, given its terms in the order in which the text has them."""
        return add(terms)

    def multiplied(self, factors: list[Shape]) -> Shape:
        """Returns the shape of a product, given its factors in the order in which the text has them; divisors are powers of -1."""
        return multiply(factors)

    def divisor(self, by: Shape) -> Shape:
        """Returns the factor that represents a division by this shape: its power of -1."""
        return power(by, Fraction(-1))

    def raised(self, base: Shape, exponent: Shape) -> Shape:
        """Returns the shape of a power or root, given its base and its exponent."""
        return power(base, exponent)

    def applied(self, function: tuple[Shape, ...]) -> Shape:
        """Returns the shape of a function's value, given a tuple of the function's name and its arguments."""
        return function

    @property
    def token(self) -> str | None:
        return self._tokens[self._position].group() if self._position < len(self._tokens) else None

    def _take(self, wanted: str) -> None:
        if self.token != wanted:
            raise _NoExpressionError
        self._position += 1

    def sum(self, depth: int) -> Shape:
        if depth > _MAX_DEPTH:
            raise _NoExpressionError
        terms = []
        while True:
            sign = Fraction(1)
            while self.token in ("+", "-"):
                sign *= -1 if self.token == "-" else 1
                self._position += 1
            terms.append(multiply([sign, self._product(depth)]))
            if self.token not in ("+", "-"):
                return self.added(terms)

    def _product(self, depth: int) -> Shape:
        factors = [self._factor(depth)]
        while True:
            token = self.token
            if token in ("*", *(f"\\{name}" for name in _TIMES)):
                self._position += 1
                factors.append(self._signed(depth))
            elif token in ("/", r"\div"):
                self._position += 1
                factors.append(self.divisor(self._signed(depth)))
            elif token is not None and token not in _ENDS:
                factors.append(self._factor(depth))
            else:
                return self.multiplied(factors)

    def _signed(self, depth: int) -> Shape:
        if self.token == "-":
            self._position += 1
            return multiply([Fraction(-1), self._factor(depth)])
        return self._factor(depth)

    def _factor(self, depth: int) -> Shape:
        found = self._atom(depth)
        while self.token in ("^", "!"):
            depth += 1  # a base lies deeper than a factor without a power
            if depth > _MAX_DEPTH:
                raise _NoExpressionError
            if self.token == "!":
                self._position += 1
                found = self.applied(("!", found))
            else:
                self._position += 1
                found = self.raised(found, self._argument(depth))
        return found

    def _argument(self, depth: int) -> Shape:
        """Parses the argument of "^" or "_": a group in braces or one token. "x^10" is read as x^{10}, unlike in TeX."""
        if self.token in ("{", "("):
            return self._bracketed(depth)
        if self.token == "-":
            self._position += 1
            return multiply([Fraction(-1), self._argument(depth)])
        return self._atom(depth)

    def _command_argument(self, depth: int) -> Shape:
        r"""Parses the argument of a command: of several digits only the first, as in TeX, so that \frac12x is a half x."""
        token = self.token
        if token is None or not token[0].isdecimal() or len(token) == 1:
            return self._argument(depth)
        rest = _TOKEN.match(token[1:])
        assert rest is not None, "digits follow, or a point and digits"
        self._tokens[self._position] = rest
        return Fraction(token[0])

    def _bracketed(self, depth: int) -> Shape:
        opening = self.token
        assert opening is not None
        self._position += 1
        found = self.sum(depth + 1)
        self._take(_CLOSED_BY[opening])
        return found

    def _atom(self, depth: int) -> Shape:
        if self._position >= len(self._tokens) or depth > _MAX_DEPTH:
            raise _NoExpressionError
        match = self._tokens[self._position]
        token = match.group()
        if token in _CLOSED_BY:
            return self._bracketed(depth)
        self._position += 1
        if token == "|":
            found = self.sum(depth + 1)
            self._take("|")
            return self.applied(("abs", found))
        if match["number"]:
            return Fraction(token)
        if match["letter"] or match["command"] in _SYMBOLS:
            if self.token == "_":
                self._position += 1
                return ("_", token, self._argument(depth))
            return token
        return self._command(match["command"], depth)

    def _command(self, command: str | None, depth: int) -> Shape:
        if command == "sqrt":
            degree = self._bracketed(depth) if self.token == "[" else Fraction(2)
            return self.raised(self._command_argument(depth), power(degree, Fraction(-1)))
        if command == "frac":
            return self.multiplied([self._command_argument(depth), self.divisor(self._command_argument(depth))])
        if command == "binom":
            return self.applied(("binom", self._command_argument(depth), self._command_argument(depth)))
        if command in _ROUNDINGS:
            found = self.sum(depth + 1)
            self._take(_ROUNDINGS[command])
            return self.applied((command, found))
        if command not in FUNCTIONS:
            raise _NoExpressionError
        base: Shape = Fraction(1)
        exponent: Shape = Fraction(1)
        while self.token in ("_", "^"):
            sign = self.token
            self._position += 1
            if sign == "_":
                base = self._argument(depth)
            else:
                exponent = self._argument(depth)
        # The argument is the product of the factors that follow without a sign: two in "\sin 2x".
        if self.token in ("(", "{"):
            argument = self._bracketed(depth)
        else:
            factors = [self._factor(depth + 1)]
            while self.token is not None and re.match(r"[0-9A-Za-z]|\\(?:pi|theta|alpha|beta|frac)", self.token):
                factors.append(self._factor(depth + 1))
            argument = self.multiplied(factors)
        return power(self.applied((command, base, argument)), exponent)


# More than the tolerance of decimals, and far more than the rounding of a few hundred operations.
_FAR = 1e-5
# "1\frac{1}{2}" may be a mixed number.
_MIXED = re.compile(r"[0-9] ?\\frac")
_LARGEST = 1e100


class _NoValueError(Exception):
    pass


def differ(gold: str, answer: str) -> bool:
    """Returns whether the values of two normalised texts certainly differ, found numerically at one point."""
    values = _value(gold, 0), _value(answer, 0)
    return values[0] is not None and values[1] is not None and _far(*values)  # type: ignore[arg-type]


def equations_differ(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    """Returns whether two equations, given by their sides, are certainly not equivalent: neither is a constant multiple of the
    other."""
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
