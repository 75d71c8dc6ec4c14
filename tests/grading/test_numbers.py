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
        ("3.141593", "3.14159265"),
        ("0.3333333", "1/3"),
        ("2/3", "0.666667"),
        ("2/3", "0.6666666"),  # cut off
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
        ("24", "23.9999999"),  # 24 neither rounded nor cut off
        ("0.5", "0.5000003"),  # no rounded gold
        ("1/3", "0.3333331"),
        ("1/8", "0.1250001"),
    ],
)
def test_not_the_same(gold: str, answer: str) -> None:
    assert not equal(gold, answer)


@given(st.fractions(), st.fractions())
def test_ratios_compare_as_rationals(left: Fraction, right: Fraction) -> None:
    gold = rf"\frac{{{left.numerator}}}{{{left.denominator}}}"
    assert equal(gold, f"{right.numerator * 7}/{right.denominator * 7}") == (left == right)


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6), st.integers(0, 12), st.integers(-3, 3))
def test_a_decimal_is_the_number_rounded_or_cut_off(numerator: int, denominator: int, places: int, more: int) -> None:
    """Decimals within one unit of their last digit, from the nearest ones."""
    gold, unit = Fraction(numerator, denominator), Fraction(1, 10**places)
    written = (gold / unit).__floor__() + more
    digits = f"{abs(written):0{places + 1}d}"
    text = ("-" if written < 0 else "") + digits[: len(digits) - places] + ("." + digits[-places:] if places else ".0")
    difference = abs(written * unit - gold)
    near = difference < (unit if places else Fraction(1, 10)) and difference <= Fraction(1, 10**6) * min(1, abs(gold))
    assert equal(f"{numerator}/{denominator}", text) == (difference == 0 or near)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 50), st.sampled_from(["", "-"]))
def test_mixed_numbers(whole: int, numerator: int, more: int, sign: str) -> None:
    denominator = numerator + more
    expected = (whole + Fraction(numerator, denominator)) * (-1 if sign else 1)
    assert value(rf"{sign}{whole}\frac{{{numerator}}}{{{denominator}}}") == expected
    assert value(f"{sign}{whole} {numerator}/{denominator}") == expected


def test_a_decimal_says_so() -> None:
    assert read_number("0.50") == Number(Fraction(1, 2), places=2)
    assert read_number("1/2") == Number(Fraction(1, 2))
    assert read_number("1e3") == Number(Fraction(1000))
    assert read_number("1.50e1") == Number(Fraction(15), places=1)


@pytest.mark.parametrize(
    ("text", "simplest"),
    [
        ("24", True),
        ("24.00", True),
        ("2/3", True),
        ("4/6", False),
        ("24/1", False),
        ("0/5", False),
        (r"-\frac{4}{6}", False),
        (r"\frac{3}{-4}", True),
        (r"1\frac{3}{4}", True),
        (r"1\frac{2}{4}", False),
        (r"2.4\times 10^{1}", True),
        ("24e0", False),
        ("0.24e2", False),
        (r"0.\overline{3}", True),
        (r"23.\overline{9}", False),
        (r"24.\overline{0}", False),
    ],
)
def test_simplest_form(text: str, simplest: bool) -> None:
    number = read_number(normalize(text))
    assert number is not None
    assert number.simplest is simplest
