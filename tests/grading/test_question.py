"""What must not be paid for: big numbers nearly right, echoes of the question, and parts that are still to be worked out."""

from __future__ import annotations

import time

import pytest

from nmoe.grading.math.equivalence import settle
from nmoe.grading.math.question import Policy
from nmoe.grading.math.symbolic import equal
from nmoe.grading.prose import from_prose


def graded(gold: str, answer: str, policy: Policy | None = None) -> bool:
    policy = policy or Policy()
    verdict = settle(gold, answer, policy)
    return equal(gold, answer, *policy.arguments) if verdict is None else verdict.outcome == "correct"


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("2^{2017}-1", "2^{2016}+2^{2016}-1", "2^{2017}+1"),
        ("2^{2017}-1", "-1+2^{2017}", "2^{2017}"),
        ("100!", r"100\cdot 99!", "100!+1"),
        (r"\binom{200}{100}", r"\binom{200}{100}", r"\binom{200}{100}+1"),
        (r"\binom{200}{100}", r"\frac{200!}{100!100!}", r"\binom{200}{100}-1"),
        (r"2^{300}\sqrt{2}", r"\sqrt{2}\cdot 2^{300}", r"2^{300}\sqrt{2}+1"),
        ("1", r"1+0\cdot\sqrt{2}", r"1+\frac{\sqrt{2}}{10^{60}}"),
        ("2^{300}x", r"2^{299}\cdot 2x", "(2^{300}+1)x"),
    ],
)
def test_big_numbers_are_compared_to_the_last_digit(gold: str, right: str, wrong: str) -> None:
    assert graded(gold, right)
    assert not graded(gold, wrong)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("3 quarters", "3"),
        ("9 squared", "9"),
        ("7 factorial", "7"),
        ("5 lakh", "5"),
        ("2 crore", "2"),
        ("3 halves", "3"),
        ("2 sin x", "2"),
        (r"4\text{ hundredths}", "4"),
    ],
)
def test_number_words_are_no_units(gold: str, answer: str) -> None:
    assert not graded(gold, answer)
    assert not graded(answer, gold, Policy(units="any"))
    assert graded(gold, gold)


SIMPLIFY = Policy(question=r"Simplify $\sqrt{180}$.")
FACTOR = Policy(question="Factor 9y^2-30y+25.")
SOLVE = Policy(question="Solve $2x+3=13$ for $x$.")
NUMBER = Policy(question="How many are there?")


@pytest.mark.parametrize(
    ("policy", "gold", "right", "wrong"),
    [
        (SIMPLIFY, r"6\sqrt{5}", r"6\sqrt5", r"\sqrt{180}"),
        (SIMPLIFY, r"6\sqrt{5}", r"\sqrt5\cdot 6", r"\sqrt{180}+0"),
        (SIMPLIFY, r"6\sqrt{5}", r"6\sqrt{5}", r"{\sqrt{180}}"),
        (SIMPLIFY, r"6\sqrt{5}", r"6\cdot\sqrt{5}", r"1\sqrt{180}"),
        (SIMPLIFY, r"6\sqrt{5}", r"\sqrt5 \times 6", r"2\cdot 3\sqrt{5}"),
        (SIMPLIFY, r"(6\sqrt{5}, 1)", r"(6\sqrt{5}, 1)", r"(\sqrt{180}, 1)"),
        (SIMPLIFY, r"6\sqrt{5}", r"x=6\sqrt5", r"x=180^{1/2}"),
        (FACTOR, "(3y-5)^2", "(5-3y)^2", "9y^{2}-30y+25"),
        (FACTOR, "(3y-5)^2", "(3y-5)(3y-5)", "25-30y+9y^2"),
        (SOLVE, "x=5", "5", "2x+3=13"),
        (SOLVE, "x=5", "x=5", "13=2x+3"),
        (SOLVE, "5", "x=5", "x=2+3"),
        (NUMBER, "(3,4)", "(3,4)", "(2+1,2+2)"),
        (NUMBER, r"5\text{ cm}", "5 cm", r"2+3\text{ cm}"),
        (NUMBER, "6", "6.0", r"\frac{12}{2}"),
        (NUMBER, "6", "6", "2(3)"),
    ],
)
def test_what_the_question_has_and_what_is_left_to_do_is_no_answer(
    policy: Policy, gold: str, right: str, wrong: str
) -> None:
    assert graded(gold, right, policy)
    assert not graded(gold, wrong, policy)


@pytest.mark.parametrize(
    ("policy", "gold", "answer", "expected"),
    [
        (Policy(), "1, 2", "2, 1", True),
        (Policy(answer_order="as_gold"), "1, 2", "2, 1", False),
        (Policy(answer_order="as_gold"), "1, 2", r"\{1, 2\}", True),
        (Policy(answer_order="as_gold"), "(1,2),(2,1)", "(2,1),(1,2)", True),
        (Policy(), "PQ=6,RS=2", "2, 6", False),
        (Policy(), "5", "5 cm", False),
        (Policy(units="any"), "5", "5 cm", True),
        (Policy(units="any"), "5", "5 dozen", False),
        (Policy(units="any"), "5", r"5\%", False),
        (Policy(question="How many cm long is it?"), "5", "5 cm", True),
        (Policy(question="How many cm long is it?"), "5", "5 m", False),
        (Policy(question="It is 3 km long. How many cm is that?"), "5", "5 cm", True),
        (Policy(question="It is 3 km long. How many cm is that?"), "5", "5 km", False),
        (Policy(question="It is 3 km and 4 cm long. Find twice of it."), "5", "5 cm", False),
        (Policy(units="as_gold", question="How many cm long is it?"), "5", "5 cm", False),
        (Policy(question="What percent of 80 is 20?"), "25", r"25\%", True),
        (Policy(question="What percent of 80 is 20?"), "0.25", r"25\%", True),
        (Policy(question="What percent of 80 is 20?"), "25", r"20\%", False),
        (Policy(question="Express it as a percentage."), "x=25", "25 percent", True),
        (Policy(question="What is 20 percent of 125?"), "25", r"25\%", False),
        (Policy(question="How many cm are 20 percent of it?"), "25", r"25\%", False),
        (Policy(units="as_gold", question="What percent of 80 is 20?"), "25", r"25\%", False),
        (Policy(question="How many cents is it?"), "5", r"5\text{ dollars}", False),
        (Policy(question="How many cents is it?"), "5", r"\$5", False),
        (Policy(question="How many cents is it?"), "x=5", r"\$5", False),
        (Policy(question="How many dollars is it?"), "5", r"5\text{ dollars}", True),
        (Policy(question="How much does she make every day?"), "5", r"5\text{ dollars}", True),
        (Policy(question="How much does she make every day?"), "5", r"\$5", True),
        (Policy(question="How many dollars is it?"), "5", r"\$5", True),
        (Policy(question="How many apples?"), "5", "$5", True),
        (Policy(units="as_gold"), "5", r"5\text{ dollars}", False),
        (Policy(units="as_gold"), "5", r"\$5.00", True),
        (Policy(), r"\$5", r"5\text{ dollars}", True),
        (Policy(), r"5\text{ dollars}", r"\$5", True),
        (Policy(), r"5\text{ cents}", r"\$5", False),
    ],
)
def test_order_and_units(policy: Policy, gold: str, answer: str, expected: bool) -> None:
    assert graded(gold, answer, policy) is expected


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        (r"\frac{\pi}{4}+k\pi, k\in\mathbb{Z}", r"\frac{\pi}{4}+k\pi", True),
        (r"\frac{\pi}{4}+k\pi, k\in\mathbb{Z}", r"k\pi+\frac{\pi}{4}, k\in\mathbb{Z}", True),
        (r"\frac{\pi}{4}+k\pi, k\in\mathbb{Z}", r"\frac{\pi}{3}+k\pi", False),
        (r"x=2k\pi, k\in\mathbb{Z}", r"2\pi k", True),
        (r"2\pi k, k\in\mathbb{Z}", r"2\pi", False),
        (r"3n, n\in N", "3n", True),
        (r"3n, n\in N", r"4n, n\in N", False),
        (r"m+n\pi, m, n\in\mathbb{Z}", r"m+n\pi", True),
        (r"m+n\pi (m, n\in\mathbb{Z})", r"m+n\pi", True),
        (r"2k+1(k\in Z)", "2k+1", True),
    ],
)
def test_a_general_solution_is_all_that_stands_before_its_index(gold: str, answer: str, expected: bool) -> None:
    assert graded(gold, answer, Policy()) is expected


HOSTILE = [r"\sqrt(", "sqrt(", "(", r"\{", "{", r"\frac{", "|", r"\text{", "x=", "1,", "a and "]


@pytest.mark.parametrize("part", HOSTILE)
def test_twice_the_length_takes_no_more_than_a_little_over_twice_the_time(part: str) -> None:
    """The time of an answer that is as long as answers may be; a square would take four times that of half of it."""

    def seconds(length: int) -> float:
        times = []
        for repeat in range(3):
            answer = part * (length // len(part)) + str(repeat)
            began = time.thread_time()
            settle("x+1", answer)
            settle(r"\sqrt{2}", answer, SIMPLIFY)
            times.append(time.thread_time() - began)
        return min(times)

    assert seconds(960) < 3.2 * seconds(480) + 0.03


@pytest.mark.parametrize("part", ["$", r"\[", r"\(", "$$x", "answer is ", r"\boxed{1} and ", r"\boxed{", "#### ", "1 "])
def test_extraction_takes_time_in_proportion(part: str) -> None:
    def seconds(length: int) -> float:
        text = part * (length // len(part))
        times = []
        for _ in range(3):
            began = time.thread_time()
            from_prose(text)
            times.append(time.thread_time() - began)
        return min(times)

    assert seconds(60_000) < 3.2 * seconds(30_000) + 0.03
