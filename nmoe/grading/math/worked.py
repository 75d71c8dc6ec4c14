r"""Decides whether an expression is worked out: no arithmetic with constants is left to do, except for kinds that the gold leaves,
too.

    \frac{6}{2}x, (2+4)\pi, 2\pi+4\pi, \sqrt{4}x, 5^2y, |3-5|x, \sin\frac{\pi}{6}, \frac{x(x+1)}{x}     not worked out
    3x, 6\pi, x(x+1), (x+1)^2, \sqrt{180}, \frac{1}{\sqrt{2}}, 3\cdot 2^{n-1}, 4\times 10^{-7}x            worked out

Sums of numbers or of like terms, products and quotients of numbers that are not a fraction in lowest terms, powers and roots of
numbers that are rational, factors that cancel, and functions of constants are left to do. If the gold has one of a kind, an
answer may have one too. `folded` does the arithmetic, so that an echo of the question is found behind it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

from nmoe.grading.math.expressions import FUNCTIONS
from nmoe.grading.math.shape import Parser, Shape, add, multiply, parts, shape

_KINDS = dict.fromkeys(FUNCTIONS, "trigonometry") | {"ln": "logarithm", "log": "logarithm", "exp": "exponential"}
_KINDS |= {"!": "counting", "binom": "counting", "abs": "size", "lfloor": "size", "lceil": "size"}
_CONSTANTS = {"e", r"\pi"}
# Powers of ten are worked out in scientific notation.
_FIRST_POWER_OF_TEN = 4
_MAX_BITS = 4096


def is_worked_out(answer: str, *golds: str) -> bool:
    """Returns whether a normalised text leaves only such kinds of arithmetic undone as one of the gold's texts leaves undone. A
    text that is no expression is worked out if no gold is one."""
    left = _left_to_do(answer)
    if left is None:
        return all(shape(gold) is None for gold in golds)
    return not left - frozenset[str]().union(*(_has(gold) for gold in golds))


@lru_cache(4096)
def _left_to_do(text: str) -> frozenset[str] | None:
    reader = _Reader(text)
    return None if reader.read() is None else frozenset(reader.left)


@lru_cache(4096)
def _has(gold: str) -> frozenset[str]:
    """Returns the kinds of arithmetic that a gold leaves undone, and the kinds of all functions in it."""
    found = shape(gold)
    kinds = {_KINDS[part[0]] for part in parts(found) if part[0] in _KINDS} if found is not None else set()
    return (_left_to_do(gold) or frozenset()) | kinds


class _Reader(Parser):
    """Parses an expression and collects in `left` the kinds of arithmetic that are left to do."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.left: set[str] = set()

    def added(self, terms: list[Shape]) -> Shape:
        flat = list(_flat("+", terms))
        rests = [multiply([_without_square(factor)[1] for factor in rest]) for _, rest in map(_split, flat)]
        if len(flat) > 1 and (Fraction(0) in flat or len(set(rests)) < len(rests)):
            self.left.add("sum")
        return super().added(terms)

    def multiplied(self, factors: list[Shape]) -> Shape:
        over, under = _fraction(factors)
        numbers = [[one for one in side if isinstance(one, Fraction) and abs(one) != 1] for side in (over, under)]
        above, below = (side[0] if side else Fraction(1) for side in numbers)
        decimal = above.denominator > 1 and below != 1
        if max(map(len, numbers)) > 1 or below.denominator > 1 or decimal:
            self.left.add("product")
        contents = [
            math.prod(map(_content, side), start=abs(one.numerator)) for side, one in ((over, above), (under, below))
        ]
        if math.gcd(*contents) > 1:
            self.left.add("product")
        bases = [{_base(one) for one in side if isinstance(one, str | tuple)} for side in (over, under)]
        roots = [one for one in over if isinstance(one, tuple) and one[0] == "^" and isinstance(one[1], Fraction)]
        if bases[0] & bases[1] or len(set(roots)) < len(roots):
            self.left.add("product")
        return super().multiplied(factors)

    def divisor(self, by: Shape) -> Shape:
        value = constant(by)
        if value is not None and (value.denominator > 1 or abs(value) == 1):
            self.left.add("product")
        return super().divisor(by)

    def raised(self, base: Shape, exponent: Shape) -> Shape:
        value, degree = constant(base), constant(exponent)
        if degree is not None and (degree in (0, 1) or (value is not None and _is_rational(value, degree))):
            self.left.add("power")
        if degree is not None and isinstance(base, tuple) and base[0] == "^" and constant(base[1]) is not None:
            self.left.add("power")
        return super().raised(base, exponent)

    def applied(self, function: tuple[Shape, ...]) -> Shape:
        if _is_constant(function[-1]) and _KINDS[function[0]] != "exponential":
            self.left.add(_KINDS[function[0]])
        return super().applied(function)


def _flat(sign: str, items: list[Shape]) -> Iterator[Shape]:
    for one in items:
        if isinstance(one, tuple) and one[0] == sign:
            yield from one[1:]
        else:
            yield one


def _split(term: Shape) -> tuple[Fraction, list[Shape]]:
    """Splits a term into its rational coefficient and the other factors."""
    coefficient, rest = Fraction(1), []
    for factor in _flat("*", [term]):
        value = constant(factor)
        if value is None:
            rest.append(factor)
        else:
            coefficient *= value
    return coefficient, rest


def _fraction(factors: list[Shape]) -> tuple[list[Shape], list[Shape]]:
    """Splits factors into numerator and denominator."""
    over: list[Shape] = []
    under: list[Shape] = []
    for one in _flat("*", factors):
        if isinstance(one, tuple) and one[0] == "^" and one[2] == -1:
            under += _flat("*", [one[1]])
        else:
            over.append(one)
    return over, under


def _base(one: Shape) -> Shape:
    """Returns the base of a power with a constant exponent; any other factor unchanged."""
    return one[1] if isinstance(one, tuple) and one[0] == "^" and constant(one[2]) is not None else one


def _content(factor: Shape) -> int:
    """Returns the largest integer that can be factored out of a sum, or of the root of an integer; 1 for other factors."""
    if not isinstance(factor, tuple) or factor[0] != "+":
        return _without_square(factor)[0]
    coefficients = []
    for coefficient, rest in map(_split, factor[1:]):
        coefficients.append(coefficient * math.prod(_without_square(one)[0] for one in rest))
    return (
        math.gcd(*(one.numerator for one in coefficients)) if all(one.denominator == 1 for one in coefficients) else 1
    )


def _without_square(factor: Shape) -> tuple[int, Shape]:
    """Splits the square root of an integer into the factor before the root and the root; 1 and the factor for any other."""
    if not isinstance(factor, tuple) or factor[0] != "^" or constant(factor[2]) != Fraction(1, 2):
        return 1, factor
    value = constant(factor[1])
    if value is None or value <= 0 or value.denominator > 1 or not _is_small(value, Fraction(2)):
        return 1, factor
    outside, inside = 1, value.numerator
    for prime in _PRIMES:
        while inside % prime**2 == 0:
            outside, inside = outside * prime, inside // prime**2
    return outside, ("^", Fraction(inside), Fraction(1, 2))


def constant(one: Shape) -> Fraction | None:
    """Returns the value of a number, a quotient or a product of numbers; None for any other shape."""
    if isinstance(one, Fraction):
        return one
    if isinstance(one, tuple) and one[0] == "^" and one[2] == -1 and isinstance(one[1], Fraction) and one[1]:
        return 1 / one[1]
    if isinstance(one, tuple) and one[0] == "*":
        values = [constant(part) for part in one[1:]]
        return math.prod(value for value in values if value is not None) if None not in values else None  # type: ignore[return-value]
    return None


def _is_constant(one: Shape) -> bool:
    """Returns whether a shape contains no letters other than e and pi."""
    if isinstance(one, str):
        return one in _CONSTANTS
    return isinstance(one, Fraction) or (one[0] != "_" and all(map(_is_constant, one[1:])))


def _is_rational(base: Fraction, exponent: Fraction) -> bool:
    """Returns whether a power of a number is rational and should be worked out; 1/n and large powers of ten should not."""
    if exponent.denominator == 1:
        power_of_ten = base == 10 and not 0 <= exponent < _FIRST_POWER_OF_TEN
        return exponent != -1 and not power_of_ten and _is_small(base, exponent)
    return _root(abs(base), exponent.denominator) is not None


def _is_small(base: Fraction, exponent: Fraction) -> bool:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    return bits * abs(exponent) <= _MAX_BITS


def _root(value: Fraction, degree: int) -> Fraction | None:
    """Returns the rational root of a number; None if it has none."""
    if value < 0 or degree > 64 or max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        return None
    roots = [_integer_root(part, degree) for part in (value.numerator, value.denominator)]
    found = Fraction(roots[0], roots[1])
    return found if found**degree == value else None


def _integer_root(value: int, degree: int) -> int:
    if degree == 2 or value < 2:
        return math.isqrt(value) if degree == 2 else value
    low, high = 1, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low


def has_square_factor(one: Shape) -> bool:
    r"""Returns whether a shape has a root of an integer from which a factor can be taken out, like \sqrt{180}."""
    for part in parts(one):
        base, degree = (constant(part[1]), constant(part[2])) if part[0] == "^" else (None, None)
        if base is None or degree is None or degree.denominator not in (2, 3):
            continue
        size, root = abs(base.numerator), degree.denominator
        if abs(degree) > 1 or any(size % divisor**root == 0 for divisor in _PRIMES):
            return True
    return False


_PRIMES = [number for number in range(2, 100) if all(number % smaller for smaller in range(2, number))]


def has_root_below(one: Shape) -> bool:
    """Returns whether a shape has a root of a number in a denominator."""
    for part in parts(one):
        if part[0] != "^" or (degree := constant(part[2])) is None or degree >= 0:
            continue
        if degree.denominator > 1 and constant(part[1]) is not None:
            return True
        roots = [inner for inner in parts(part[1]) if inner[0] == "^" and constant(inner[1]) is not None]
        if any((constant(inner[2]) or Fraction(1)).denominator > 1 for inner in roots):
            return True
    return False


@lru_cache(4096)
def folded(one: Shape) -> Shape:
    """Returns a shape with the arithmetic of constants done: like terms and factors combined, roots and absolute values
    computed.
    """
    if not isinstance(one, tuple):
        return one
    if one[0] == "_":
        return one
    inner = [folded(part) for part in one[1:]]
    if one[0] == "+":
        return _folded_sum(list(_flat("+", inner)))
    if one[0] == "*":
        return _folded_product(list(_flat("*", inner)))
    if one[0] == "^":
        return _folded_product([("^", *inner)])
    if one[0] == "abs" and _is_positive(inner[0]):
        return inner[0]
    return (one[0], *inner)


def _folded_sum(terms: list[Shape]) -> Shape:
    coefficients: dict[Shape, Fraction] = defaultdict(Fraction)
    for term in terms:
        coefficient, rest = _split(term)
        coefficients[multiply(rest)] += coefficient
    return add([_scaled(value, rest) for rest, value in coefficients.items() if value])


def _scaled(value: Fraction, rest: Shape) -> Shape:
    if rest == 1:
        return value
    return multiply([value, rest])


def _folded_product(factors: list[Shape]) -> Shape:
    coefficient = Fraction(1)
    exponents: dict[Shape, list[Shape]] = defaultdict(list)
    for factor in factors:
        base, exponent = (
            (factor[1], factor[2]) if isinstance(factor, tuple) and factor[0] == "^" else (factor, Fraction(1))
        )
        if isinstance(base, tuple) and base[0] == "^" and constant(exponent) is not None and _is_positive(base[1]):
            base, exponent = base[1], _folded_product([base[2], exponent])
        if isinstance(base, tuple) and base[0] == "*" and (exponent == -1 or _is_positive(base)):
            for inner in base[1:]:
                exponents[inner].append(exponent)
        else:
            exponents[base].append(exponent)
    roots: dict[Fraction, Fraction] = defaultdict(lambda: Fraction(1))
    kept: list[Shape] = []
    for base, several in exponents.items():
        exponent = _folded_sum(list(_flat("+", several)))
        value, degree = constant(base), constant(exponent)
        if value is None or degree is None or not _is_small(value, abs(degree) + 1):
            kept.append(base if exponent == 1 else ("^", base, exponent))
            continue
        if value <= 0 and (degree.denominator > 1 or (value == 0 and degree <= 0)):
            kept.append(("^", base, exponent))
            continue
        whole = math.floor(degree)
        coefficient *= value**whole
        if degree > whole:
            roots[degree - whole] *= value
    for degree, value in sorted(roots.items()):
        root = _root(value, degree.denominator)
        if root is not None:
            coefficient *= root**degree.numerator
        else:
            kept.append(("^", value, degree))
    product = multiply(kept) if kept else Fraction(1)
    return coefficient if product == 1 else multiply([coefficient, product])


def _is_positive(one: Shape) -> bool:
    """Returns whether a shape is certainly a positive number."""
    if isinstance(one, Fraction):
        return one > 0
    if isinstance(one, str):
        return one in _CONSTANTS
    if one[0] == "^":
        return _is_positive(one[1]) and _is_constant(one[2])
    return one[0] in ("+", "*") and all(map(_is_positive, one[1:]))
