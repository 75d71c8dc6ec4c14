"""The symbolic layer in this process: what math-verify alone would let pass, and what it settles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.grading.math import symbolic
from nmoe.grading.math.equivalence import settle
from nmoe.grading.math.symbolic import equal


def graded(gold: str, answer: str) -> bool:
    verdict = settle(gold, answer)
    return equal(gold, answer) if verdict is None else verdict.outcome == "correct"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
        (r"\sin^2 x + \cos^2 x", "1"),
        (r"2\sin(x)\cos(x)", r"\sin 2x"),
        (r"\log_2 8", "3"),
        (r"\ln 4", "2ln(2)"),
        ("x**2 - 1", "(x-1)(x+1)"),
        (r"\binom{10}{3}", "120"),
        ("5!", "120"),
        ("n!", "n(n-1)!"),
        (r"\frac{x}{2}", "0.5x"),
        ("a_1 + b", "b + a_{1}"),
        ("sqrt(2)/2", r"\frac{1}{\sqrt2}"),
        (r"e^{i\pi}", "-1"),
        ("(3+4i)(3-4i)", "25"),
        (r"(-\infty, \sqrt{8})", r"x < 2\sqrt{2}"),
        (r"\begin{pmatrix} \sqrt{8} \\ x+1 \end{pmatrix}", r"\begin{pmatrix} 2\sqrt{2} \\ 1+x \end{pmatrix}"),
        (r"\{\sqrt{8}, \sqrt{2}\}", r"\{\sqrt{2}, 2\sqrt{2}\}"),
        ("x^2 + y^2 = 1", "y^2 = 1 - x^2"),
        (r"\lfloor 2.5 \rfloor", "2"),
    ],
)
def test_the_same(gold: str, answer: str) -> None:
    assert graded(gold, answer)
    assert graded(answer, gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"e^{\pi\sqrt{163}}", "262537412640768744"),  # 7.5e-13 apart
        (r"\frac{\sqrt{2}}{10^8}", "0.0"),
        ("0", r"\frac{1}{10^{60}}"),
        ("x", "x + 10^{-20}"),
        (r"\sqrt{x^2}", "x"),
        (r"\ln(x^2)", r"2\ln x"),
        ("x = x + 1", "x = x + 2"),  # without solutions, both
        ("0 = 0", "1 = 1"),
        ("5x", "5X"),
        ("3x", "3 + x"),
        (r"\frac{1}{0}", r"\frac{2}{0}"),
        (r"\infty", r"-\infty"),
        ("x^2 + 1", "(x^2 + 1, 2)"),
        ("2 cats", "2 acts"),
        (r"\log x", r"\ln x"),
        ("ab + cd", "(a+c)(b+d)"),
        ("f'(x)", "f(x)"),
    ],
)
def test_not_the_same(gold: str, answer: str) -> None:
    assert not graded(gold, answer)
    assert not graded(answer, gold)


@given(*[st.integers(-9, 9)] * 4, st.integers(-3, 3))
@settings(max_examples=40, deadline=None)
def test_expanded_products(a: int, b: int, c: int, d: int, change: int) -> None:
    gold = f"({a}x+{b})({c}x+{d})".replace("+-", "-")
    answer = f"{a * c}x^2+{a * d + b * c + change}x+{b * d}".replace("+-", "-")
    assert graded(gold, answer) is (change == 0)


@given(st.text(max_size=30))
@settings(deadline=None)
def test_equal_is_total(answer: str) -> None:
    assert equal("x + 1", answer) in (True, False)


def test_a_parser_that_fails_on_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does when its packages do not fit one another; unnoticed, every answer would be graded wrong."""
    symbolic.warm_up()
    monkeypatch.setattr(symbolic, "_parse", lambda text, is_real: None)
    with pytest.raises(RuntimeError, match="nothing equal"):
        symbolic.warm_up()
