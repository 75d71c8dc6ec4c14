r"""What is worked out, and what arithmetic is done to find an echo: each line is from the mathematics."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.grading.math.equivalence import settle
from nmoe.grading.math.question import Policy
from nmoe.grading.math.shape import shape
from nmoe.grading.math.worked import folded, is_worked_out


@pytest.mark.parametrize(
    "text",
    [
        "3x",
        r"6\pi",
        "x(x+1)",
        "(x+1)^2",
        "(x+1)(x+1)",
        r"\sqrt{180}",
        r"\frac{1}{\sqrt{2}}",
        r"\frac{\sqrt{5}}{5}",
        r"\frac{1+\sqrt{5}}{2}",
        r"\frac{4+\sqrt{5}}{2}",
        r"3\cdot 2^{n-1}",
        r"4\times 10^{-7}x",
        r"-\frac12x+3",
        "0.5x",
        "(-1)^n",
        r"e^{-0.05t}",
        r"\frac{n(n+1)}{2}",
        r"\sqrt{2}+\sqrt{3}",
        r"\sqrt[3]{2}",
        r"\sin 2x",
        r"\frac{x^2}{9}+\frac{y^2}{4}",
        "x^{-1}",
        r"k\pi+(-1)^k\frac{\pi}{6}",
    ],
)
def test_worked_out(text: str) -> None:
    assert is_worked_out(text, "x")


@pytest.mark.parametrize(
    "text",
    [
        "1+2+x",
        "x+0",
        "x+x",
        r"2\pi+4\pi",
        r"\sqrt{12}-\sqrt{3}",
        r"\frac{x}{2}+\frac{x}{3}",
        r"2\cdot 3x",
        r"\frac{6}{2}x",
        r"\frac{2\pi}{6}",
        r"\frac{6}{2\pi}",
        r"\frac{2x+4}{2}",
        r"\frac{2x+2}{2x-2}",
        r"\frac{\sqrt{12}}{2}",
        r"\frac{1}{2}\cdot\frac{x}{3}",
        r"\frac{x}{\frac{1}{2}}",
        r"\frac{x(x+1)}{x}",
        r"\frac{x^2}{x}",
        "5^2y",
        "1^2x",
        "x^1",
        r"\sqrt{4}x",
        r"\sqrt{\frac{1}{4}}x",
        r"\sqrt[3]{8}x",
        r"(\sqrt{3})^2x",
        r"\sqrt{3}\sqrt{3}x",
        "4!x",
        r"\binom{5}{2}x",
        "|3-5|x",
        r"\lfloor 2.5\rfloor x",
        r"\sin\frac{\pi}{6}",
        r"\log_2 8+x",
        r"x^{2+1}",
    ],
)
def test_left_to_do(text: str) -> None:
    assert not is_worked_out(text, "x")
    assert is_worked_out(text, text), "the gold has it, too"


def test_a_gold_allows_one_kind_of_arithmetic_alone() -> None:
    assert is_worked_out(r"2\ln 2", r"\ln 4")
    assert not is_worked_out(r"\sin\frac{\pi}{6}+x", r"\ln 4+x")


@pytest.mark.parametrize(
    "text",
    [
        "180^{0.5}",
        r"|\sqrt{180}|",
        r"\sqrt{36\cdot 5}",
        r"\frac{180}{\sqrt{180}}",
        r"\sqrt{2}\sqrt{90}",
        r"\sqrt{181-1}",
        r"-(-\sqrt{180})",
        r"\sqrt{\sqrt{180^2}}",
        r"\frac{360}{2\sqrt{180}}",
    ],
)
def test_folding_finds_the_root_of_180(text: str) -> None:
    assert folded(shape(text)) == folded(shape(r"\sqrt{180}"))
    assert folded(shape(text)) != folded(shape(r"6\sqrt{5}"))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60))
def test_folding_a_fraction_reduces_it(numerator: int, denominator: int, factor: int) -> None:
    written = shape(rf"\frac{{{numerator * factor}}}{{{denominator * factor}}}x")
    assert folded(written) == folded(shape(rf"\frac{{{numerator}}}{{{denominator}}}x"))
    lowest = math.gcd(numerator, denominator) == 1 < denominator
    assert is_worked_out(rf"\frac{{{numerator}}}{{{denominator}}}x", "x") == lowest


CHEAP = [
    "½",
    "1½",
    "√2",
    "2x",
    "1.1",
    "+",
    "x^",
    "1!",
    "(1,2),",
    "x=1,",
    "1e5",
    "5 cm",
    "1 or ",
    r"\{1\},",
    r"\frac12",
    "((",
    "x|",
]


@pytest.mark.parametrize("part", CHEAP)
def test_no_long_answer_holds_up_the_event_loop(part: str) -> None:
    """A whole second was possible where each of 999 signs became eleven and each pair was compared."""
    for policy in (Policy(), Policy(question=r"Simplify $\sqrt{180}$ and factor it.")):
        for gold in ("42", r"\sqrt{2}", "3,5"):
            began = time.thread_time()
            verdict = settle(gold, "1" + (part * 1000)[:990], policy)
            assert time.thread_time() - began < 0.15
            assert verdict is None or verdict.outcome == "incorrect"
