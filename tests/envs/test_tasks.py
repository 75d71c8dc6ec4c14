"""Every task: what it asks, what it accepts, which gold answers it refuses; generators against an oracle."""

from __future__ import annotations

import ast
import asyncio
import operator
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.config import registry
from nmoe.config.registry import DATASET_TASKS, GENERATED_TASKS
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.errors import UserError
from nmoe.types import Message, Problem

SEEDS = st.integers(0, 2**32)
DIFFICULTIES = st.integers(1, 12)

OWN_RECORDS = {"humaneval", "mbpp", "program", "code_edit", "code_fix", "file_search"}


def problem(task_type: str, gold: str, question: str = "?") -> Problem:
    return Problem("demo/0", task_type, question, gold, "demo")


def correct(of: Problem, answer: str) -> bool:
    verdict = asyncio.run(TASKS[of.task_type].verify(of, Attempt(answer)))
    # A predicted score earns more, the nearer it is to the right one.
    graded = of.task_type in ("meta_verification", "proof_verification", "prm_solution") and verdict.score < 1
    assert (verdict.outcome, 0.0 if graded else verdict.score) in (("correct", 1.0), ("incorrect", 0.0))
    assert 0 <= verdict.score <= 1
    return verdict.outcome == "correct"


def test_every_name_of_the_settings_has_its_task() -> None:
    assert all(TASKS[name].answer_form in ("boxed", "final", "whole") for name in registry.TASKS.names())
    assert all(hasattr(TASKS[name], "generate") == (name in GENERATED_TASKS) for name in DATASET_TASKS)


@pytest.mark.parametrize("task_type", registry.TASKS.names())
def test_the_question_is_the_one_message(task_type: str) -> None:
    assert TASKS[task_type].messages(problem(task_type, "1", "Why <|end|>?")) == [Message("user", "Why <|end|>?")]


@given(SEEDS, DIFFICULTIES)
def test_sort(seed: int, difficulty: int) -> None:
    question, gold = TASKS["sort"].generate(random.Random(seed), difficulty)
    digits = re.fullmatch(rf"Sort: ([0-9]{{{difficulty}}})", question)
    assert digits is not None
    assert gold == "".join(sorted(digits[1]))


@given(SEEDS, DIFFICULTIES)
def test_reverse(seed: int, difficulty: int) -> None:
    question, gold = TASKS["reverse"].generate(random.Random(seed), difficulty)
    digits = re.fullmatch(rf"Reverse: ([0-9]{{{difficulty}}})", question)
    assert digits is not None
    assert gold == digits[1][::-1]


@given(SEEDS, DIFFICULTIES)
def test_add(seed: int, difficulty: int) -> None:
    question, gold = TASKS["add"].generate(random.Random(seed), difficulty)
    operands = re.fullmatch(r"Add: ([0-9]+) \+ ([0-9]+)", question)
    assert operands is not None
    for operand in operands.groups():
        assert len(operand) == difficulty
        assert operand == str(int(operand))
    assert int(gold) == int(operands[1]) + int(operands[2])


def evaluate(node: ast.AST) -> int:
    """Python's own parser gives the precedence; nothing is executed."""
    if isinstance(node, ast.BinOp):
        operation = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}[type(node.op)]
        return operation(evaluate(node.left), evaluate(node.right))
    assert isinstance(node, ast.Constant)
    return node.value


@given(SEEDS, DIFFICULTIES)
def test_arithmetic(seed: int, difficulty: int) -> None:
    question, gold = TASKS["arithmetic"].generate(random.Random(seed), difficulty)
    expression = question.removeprefix("Compute: ")
    assert re.fullmatch(rf"[0-9]( [-+*] [0-9]){{{difficulty}}}", expression)
    assert int(gold) == evaluate(ast.parse(expression, mode="eval").body)


@given(st.sampled_from(sorted(GENERATED_TASKS.keys() - OWN_RECORDS)), SEEDS, st.integers(1, 200))
def test_a_generated_gold_is_readable_and_correct(task_type: str, seed: int, difficulty: int) -> None:
    task = TASKS[task_type]
    question, gold = task.generate(random.Random(seed), difficulty)
    generated = problem(task_type, gold, question)
    task.check_gold(generated)
    assert correct(generated, f" {gold}\n")
    assert not correct(generated, "?")
    assert (question, gold) == task.generate(random.Random(seed), difficulty)


@pytest.mark.parametrize(
    ("task_type", "gold", "right", "wrong"),
    [
        ("sort", "0135", ["0135", " 0135\n"], ["135", "0,135", "0135.", "0135.0", "", "$0135$"]),
        ("reverse", "0310", ["0310", "0310 "], ["310", "0130", "03 10", ""]),
        ("add", "132", ["132", "0132", "132.0"], ["131", "132 1", "47 + 85", ""]),
        ("arithmetic", "-11", ["-11", "−11"], ["11", "- 1 1", ""]),
        ("gsm8k", "1,018", ["1018", "$1,018", "1018.00"], ["1019", "1018 eggs", ""]),
        ("math", r"\frac{1}{2}", [r"\dfrac{1}{2}", "0.5", r"$\frac{1}{2}$"], ["2", "1", "", r"$\frac{2}{4}$"]),
        ("gsm8k", "18", ["x = 18", "18.0"], ["36/2", "17.9999999", r"1800\%", "9+9", r"\sqrt{324}", "9**9**9"]),
        ("math", "x^2+1", ["x^2 + 1", r"\mathrm{x}^2+1", "1+x^2", "(x+1)^2-2x"], ["x^2", "X^2+1", "9**9**9"]),
    ],
)
def test_correct(task_type: str, gold: str, right: list[str], wrong: list[str]) -> None:
    for answer in right:
        assert correct(problem(task_type, gold), answer), answer
    for answer in wrong:
        assert not correct(problem(task_type, gold), answer), answer


@pytest.mark.parametrize(
    ("task_type", "gold", "reason"),
    [
        ("sort", "1 3", "row of digits, not '1 3'"),
        ("sort", "１", "row of digits"),
        ("reverse", "ab", "row of digits"),
        ("add", "eleven", "is a number, not 'eleven'"),
        ("arithmetic", "", "is a number"),
        ("gsm8k", "18 eggs", "is a number, not '18 eggs'"),
        ("gsm8k", "nan", "is a number"),
        ("gsm8k", "1" * 5000, r"is a number, not '1{70,90}\.\.\."),
        ("math", "$.$", "nothing is left of the gold answer"),
        ("math", "6 * 3 = <<6*3=18>>18\n#### 18", "is a solution; choose a gold_extractor"),
        (
            "math",
            r"She sells 16 - 3 - 4 = 9 eggs for two dollars each, which makes $9 * 2 = \boxed{18}$ dollars.",
            "is a solution",
        ),
        ("math", "x" * 1001, "1001 characters, more than 1000.*choose a gold_extractor"),
    ],
)
def test_a_gold_that_can_not_be_compared_is_refused(task_type: str, gold: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        TASKS[task_type].check_gold(problem(task_type, gold))


def test_an_expression_of_the_question_is_no_answer_to_it() -> None:
    asked = problem("math", r"6\sqrt{5}", r"Simplify $\sqrt{180}$.")
    assert not correct(asked, r"\sqrt{180}")
    # Nor is anything left to compute, where the answer is a number.
    counted = problem("math", "70", r"Evaluate $\binom{8}{4}$.")
    assert all(correct(counted, answer) for answer in ("70", "x = 70", "70.0"))
    assert not any(
        correct(counted, answer)
        for answer in (r"\binom{8}{4}+0", r"7\cdot 10", "80-10", r"\sqrt{4900}", "70^1", r"\frac{140}{2}")
    )
    assert correct(problem("math", r"\frac{1}{6}", "?"), r"0.1\overline{6}")
    assert correct(problem("math", r"6\sqrt{5}", "?"), r"\sqrt{180}")
    assert not correct(problem("math", r"6\sqrt{5}", "?"), r"\sqrt{36}\cdot\sqrt{5}")
    assert not correct(asked, r"$\sqrt {180}$")
    assert correct(asked, r"6\sqrt5")
    assert not correct(asked, r"\sqrt{36 \cdot 5}")


@pytest.mark.parametrize(
    ("question", "any_order"),
    [
        ("Find all roots. Enter them separated by commas.", True),
        ("Enter your answers, separated with commas.", True),
        ("List the solutions in any order.", True),
        ("Find all roots.", True),
        ("Enter the angles, separated by commas, in increasing order.", False),
        ("Find $a$ and $b$, respectively, separated by commas.", False),
    ],
)
def test_a_list_has_an_order_unless_the_question_says_otherwise(question: str, any_order: bool) -> None:
    asked = problem("math", r"-2, \sqrt{8}", question)
    assert correct(asked, r"-2, 2\sqrt{2}")
    assert correct(asked, r"2\sqrt{2}, -2") is any_order
    assert correct(asked, r"\{2\sqrt{2}, -2\}") is any_order
    assert not correct(asked, r"2\sqrt{2}, 2")


@given(
    st.sampled_from(sorted(DATASET_TASKS.keys() - {"multiple_choice", "open"} - OWN_RECORDS)),
    st.text(),
)
@settings(deadline=None)
def test_correct_is_total(task_type: str, answer: str) -> None:
    assert correct(problem(task_type, "1"), answer) in (True, False)
