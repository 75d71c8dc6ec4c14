"""Tasks whose answer is a number, compared by value: 1,000 equals 1000.0, and a half equals 0.5."""

from __future__ import annotations

from nmoe.envs.tasks.task import Attempt, QuestionTask
from nmoe.errors import UserError, shown
from nmoe.grading.math.equivalence import settle
from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.numbers import read_number
from nmoe.grading.math.policy import Policy
from nmoe.types import Problem, Verdict


class NumericTask(QuestionTask):
    """The base of gsm8k, add, arithmetic and sum.

    The answer is a number in simplest form: 47 + 85 and 264/2 are still to be worked out, and a percent sign or a unit may be
    added only where the question asks for it.
    """

    gold_types: tuple[type, ...] = (str, int, float)

    def check_gold(self, problem: Problem) -> None:
        if read_number(normalize(problem.gold)) is None:
            raise UserError(
                f"the gold answer of a problem of type {problem.task_type} is a number, not {shown(problem.gold)}"
            )

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        number = read_number(normalize(problem.gold))
        assert number is not None, "check_gold refuses a gold that is no number"
        return problem.gold, str(number.value + 1)

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        if one.strip() == other.strip():
            return True
        verdict = settle(one, other)
        return verdict is not None and verdict.outcome == "correct"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        found = settle(problem.gold, attempt.answer, Policy(question=problem.question))
        return found or Verdict.of(False, "numeric", "an expression, not a number")
