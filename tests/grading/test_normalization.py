"""Normalisation of answers, and expressions told apart without a worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.shape import differ, equations_differ


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
        ("2π", r"2\pi"),
        ("x ≤ √2", r"x\le\sqrt{2}"),
        ("√(x + 1)", r"\sqrt{x+1}"),
        ("x²", "x^2"),
        (r"x \leqslant y", r"x\le y"),
        ("x >= 1", r"x\ge1"),
        (r"90^{\circ}", r"90^\circ"),
        ("90°", r"90^\circ"),
        (r"\pi r^2", r"\pi r^2"),
        (r"2 \times 3", r"2\times3"),
        (r"1\ 000", "1000"),
        (r"a \\ b", r"a\\b"),
        ("", ""),
        ("$.$", ""),
    ],
)
def test_normalize(text: str, normal: str) -> None:
    assert normalize(text) == normal


@given(
    st.lists(
        st.sampled_from([*"0123,.-+ $\\{}()*/x\0\n", r"\text{", r"\dfrac", r"\(", r"\ ", "√", "π", "~", "<=", r"\leq"])
    ).map("".join)
)
def test_normalize_is_idempotent(text: str) -> None:
    assert normalize(normalize(text)) == normalize(text)


EQUAL = [
    (r"\frac{x}{2}", "0.5x"),
    ("(x+1)(x-1)", "x^2-1"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt{x^2}", "|x|"),
    ("3i^2", "-3"),
    (r"1\frac{1}{2}x", r"\frac{3}{2}x"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    ("10^{300}x", r"10^{299}\cdot 10x"),
    ("1.414214", r"\sqrt{2}"),
    ("x-x+10^{-20}", "10^{-20}"),
    ("(-8)^{1/3}", "-2"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_ones_are_never_told_apart(gold: str, answer: str) -> None:
    assert not differ(normalize(gold), normalize(answer))


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("x+1", "x+2"), (r"2\sqrt{3}", r"3\sqrt{2}"), (r"\frac{\pi}{3}", r"\frac{\pi}{4}"), ("x^2y", "xy^2"), ("3", "x")],
)
def test_different_ones_are(gold: str, answer: str) -> None:
    assert differ(gold, answer)


def test_equations_up_to_a_factor() -> None:
    line = ("y", "2x+1")
    assert not equations_differ(line, ("2x-y+1", "0"))
    assert not equations_differ(line, ("6x+3", "3y"))
    assert equations_differ(line, ("2x-y-1", "0"))
    assert equations_differ(line, ("y", "3x+1"))
