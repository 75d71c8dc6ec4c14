"""Expressions told apart without a worker: never two that are equal, and most that are not."""

from __future__ import annotations

import pytest

from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.screen import differ, equations_differ

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
