"""Equality of answers: what normalisation takes away, what it must not, and exact numbers."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.rl.grading.exact import MAX_ANSWER_CHARS, equal, normalize, number


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("$42$", "42"),
        ("$$42$$", "42"),
        (r"\(42\)", "42"),
        (r"\[42\]", "42"),
        ("**42**", "42"),
        ("$42.$.", "42"),
        ("$1$ and $2$", "$1$and$2$"),
        (r"\(1\)\(2\)", r"\(1\)\(2\)"),
        ("42...", "42"),
        (r"\text{east}", "east"),
        (r"\textbf{\mathrm{x}}", "x"),
        (r"\mathbf{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"5\text{ cm}", "5 cm"),
        (r"\text{unclosed", "unclosed"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\tfrac12", r"\frac12"),
        (r"\frac {1} {2}", r"\frac{1}{2}"),
        ("a \t\n  b", "a b"),
        ("( 1 ,  2 )", "(1, 2)"),
        (r"\left( 1, 2 \right]", "(1, 2]"),
        (r"x \leftarrow y", r"x\leftarrow y"),
        ("1,234,567", "1234567"),
        (r"10{,}236", "10236"),
        (r"10,\!236", "10236"),
        ("(1,234)", "(1, 234)"),
        ("1, 234", "1, 234"),
        ("1,2", "1, 2"),
        ("1,", "1,"),
        ("042", "42"),
        ("-007.50", "-7.50"),
        ("000", "0"),
        ("0.5", "0.5"),
        ("+5", "5"),
        ("−5", "-5"),
        ("$18", "18"),
        (r"\$18", "18"),
        ("", ""),
        ("$.$", ""),
    ],
)
def test_normalize(text: str, normal: str) -> None:
    assert normalize(text) == normal


@given(st.lists(st.sampled_from([*"0123,.-+ $\\{}()*/x\0\n", r"\text{", r"\dfrac", r"\("])).map("".join))
def test_normalize_is_idempotent(text: str) -> None:
    assert normalize(normalize(text)) == normalize(text)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "42"),
        ("42", "42.0"),
        ("42", " $042.$ "),
        ("1000", "1,000"),
        ("0.5", "1/2"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", r"\dfrac{2}{4}"),
        (r"-\frac{1}{2}", r"\frac{-1}{2}"),
        ("1/3", "0.333333"),
        ("3.14159265", "3.1415926"),
        (r"\text{Tuesday}", "Tuesday"),
        ("-0", "0"),
        (".5", "0.50"),
        ("9" * 400, "9" * 400 + ".0"),
    ],
)
def test_equal(gold: str, answer: str) -> None:
    assert equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "43"),
        ("42", "-42"),
        ("42", ""),
        ("42", "$$"),
        ("1234", "(1,234)"),
        ("1234", "1, 234"),
        ("12", "1,2"),
        ("34", "3 4"),
        ("123456789", "123456790"),  # a relative 8e-9
        ("123456789", "123456789.5"),
        ("0", "0.0000001"),
        ("0.0000001", "0"),
        ("1/3", "0.33333"),
        ("1000000/999999", "1"),  # 1e-6 apart, and both exact
        ("1/2", "1/0"),
        ("1", "1/1/1"),
        ("387420489", "9**9"),
        ("1000000000", "1e9"),
        ("3", "３"),
        ("3", "٣"),
        ("9" * 400, "9" * 399 + "8"),
        ("inf", "9" * 400),
        ("east", "East"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
    ],
)
def test_not_equal(gold: str, answer: str) -> None:
    assert not equal(gold, answer)


@given(st.fractions(), st.fractions())
def test_ratios_compare_as_rationals(left: Fraction, right: Fraction) -> None:
    gold = rf"\frac{{{left.numerator}}}{{{left.denominator}}}"
    assert equal(gold, f"{right.numerator * 7}/{right.denominator * 7}") == (left == right)


@given(st.integers(), st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=9))
def test_decimals_compare_within_the_tolerance(gold: int, answer: object) -> None:
    value = Fraction(str(answer))
    allowed = Fraction(1, 10**6) * min(1, abs(gold))
    assert equal(str(gold), f"{answer:f}") == (abs(value - gold) <= allowed)


def test_number_reads_whole_texts_only() -> None:
    assert number("-7.50") == Fraction(-15, 2)
    assert number(r"-\frac{3}{6}") == Fraction(-1, 2)
    for text in ("", ".", "-", "1-2", "1.2.3", "nan", "inf", "0x10", "1_000", "1e5", "1/0", "1" * 5000):
        assert number(text) is None


@given(st.text())
def test_equal_is_total(answer: str) -> None:
    assert equal("42", answer) in (True, False)
    assert equal(answer, "42") in (True, False)


@pytest.mark.parametrize(
    "answer",
    [
        "1" * 100_000,
        "{" * 100_000,
        r"\text{" * 20_000 + "}" * 20_000,
        r"\text{" * 150 + "}" * 100,
        "$" * MAX_ANSWER_CHARS,
        "1," * (MAX_ANSWER_CHARS // 2),
        "9**9**9**9",
        "9" * MAX_ANSWER_CHARS,
        "0" * MAX_ANSWER_CHARS,
        ". " * (MAX_ANSWER_CHARS // 2),
        "inf",
        "nan",
        "\0",
    ],
    ids=lambda text: text[:8],
)
def test_hostile_answers_are_wrong_at_once(answer: str) -> None:
    start = time.process_time()
    assert not equal("42", answer)
    assert time.process_time() - start < 2
