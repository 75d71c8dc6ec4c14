"""The base of tasks over rows of digits. In nmoe's tokenizers each digit is one token, so that a row has one spelling."""

from __future__ import annotations

import random
import re

from nmoe.envs.tasks.task import Attempt, QuestionTask
from nmoe.errors import UserError
from nmoe.types import Problem, Verdict

_DIGITS = re.compile(r"[0-9]+")


def random_digits(rng: random.Random, count: int) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(count))


class DigitsTask(QuestionTask):
    """Compares rows of digits as text: "0135" is not the number 135."""

    bare_final = True

    def check_gold(self, problem: Problem) -> None:
        if not _DIGITS.fullmatch(problem.gold):
            raise UserError(
                f"the gold answer of a {problem.task_type} problem is a row of digits, not {problem.gold!r}"
            )

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, problem.gold + problem.gold[-1]

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        same = attempt.answer.strip() == problem.gold
        return Verdict.of(same, "exact", "the same digits" if same else "other digits")
