"""Numbers: what is read as one, and when two are the same."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.numbers import Number, read_number, same


def value(text: str) -> Fraction:
    number = read_number(normalize(text))
    assert number is not None, text
    return number.value


def equal(gold: str, answer: str) -> bool:
    numbers = [read_number(normalize(text)) for text in (gold, answer)]
    assert numbers[0] is not None
    assert numbers[1] is not None
    return same(numbers[0], numbers[1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-7.50", Fraction(-15, 2)),
        (".5", Fraction(1, 2)),
        ("-0", Fraction(0)),
        ("1,234.5", Fraction(2469, 2)),
        ("3/6", Fraction(1, 2)),
        (r"-\frac{3}{6}", Fraction(-1, 2)),
        (r"\frac{-3}{6}", Fraction(-1, 2)),
        (r"\dfrac12", Fraction(1, 2)),
        (r"\frac{1}2", Fraction(1, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"-1 \frac12", Fraction(-3, 2)),
        ("2 3/4", Fraction(11, 4)),
        (r"1.5\times10^{3}", Fraction(1500)),
        (r"1.5 \cdot 10^3", Fraction(1500)),
        ("2*10^-3", Fraction(1, 500)),
        ("-1.5E+3", Fraction(-1500)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"-1.\overline{27}", Fraction(-14, 11)),
        ("9" * 400, Fraction(10**400 - 1)),
    ],
)
def test_read(text: str, expected: Fraction) -> None:
    assert value(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "-",
        "1-2",
        "1.2.3",
        "nan",
        "inf",
        "0x10",
        "1_000",
        "1/0",
        r"\frac{1}{0}",
        "1/1/1",
        "1" * 5000,
        "9**9",
        "３",
        "٣",
        "1, 234",
        "(1,234)",
        "1 2",
        r"1\frac{3}{2}",
        "1e1001",
        "1e99999999",
        "1e",
        "e5",
        "1/-2",
    ],
)
def test_not_a_number(text: str) -> None:
    assert read_number(normalize(text)) is None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "42.0"),
        ("1/3", "0.333333"),
        ("3.14159265", "3.1415926"),
        ("9" * 400, "9" * 400 + ".0"),
        ("-0", "0.0"),
    ],
)
def test_same(gold: str, answer: str) -> None:
    assert equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "-42"),
        ("123456789", "123456790"),  # a relative 8e-9
        ("123456789", "123456789.5"),
        ("0", "0.0000001"),
        ("0.0000001", "0"),
        ("1/3", "0.33333"),
        ("1000000/999999", "1"),  # 1e-6 apart, and both exact
        ("9" * 400, "9" * 399 + "8"),
    ],
)
def test_not_the_same(gold: str, answer: str) -> None:
    assert not equal(gold, answer)


@given(st.fractions(), st.fractions())
def test_ratios_compare_as_rationals(left: Fraction, right: Fraction) -> None:
    gold = rf"\frac{{{left.numerator}}}{{{left.denominator}}}"
    assert equal(gold, f"{right.numerator * 7}/{right.denominator * 7}") == (left == right)


@given(st.integers(), st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=9))
def test_decimals_compare_within_the_tolerance(gold: int, answer: object) -> None:
    allowed = Fraction(1, 10**6) * min(1, abs(gold))
    assert equal(str(gold), f"{answer:f}") == (abs(Fraction(str(answer)) - gold) <= allowed)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 50), st.sampled_from(["", "-"]))
def test_mixed_numbers(whole: int, numerator: int, more: int, sign: str) -> None:
    denominator = numerator + more
    expected = (whole + Fraction(numerator, denominator)) * (-1 if sign else 1)
    assert value(rf"{sign}{whole}\frac{{{numerator}}}{{{denominator}}}") == expected
    assert value(f"{sign}{whole} {numerator}/{denominator}") == expected


def test_a_decimal_says_so() -> None:
    assert read_number("0.5") == Number(Fraction(1, 2), decimal=True)
    assert read_number("1/2") == Number(Fraction(1, 2), decimal=False)
    assert read_number("1e3") == Number(Fraction(1000), decimal=False)
