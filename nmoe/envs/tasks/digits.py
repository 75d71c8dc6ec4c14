"""Tasks over rows of digits. In nmoe's tokenizers each digit is one token, so that a row has one spelling."""

from __future__ import annotations

import random
import re

from nmoe.envs.tasks.task import AnswerForm, Attempt, GeneratedTask, QuestionTask
from nmoe.errors import UserError
from nmoe.types import Problem, Verdict

_DIGITS = re.compile(r"[0-9]+")


def random_digits(rng: random.Random, count: int) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(count))


class DigitsTask(QuestionTask):
    """Compares rows of digits as text: "0135" is not the number 135."""

    answer_form: AnswerForm = "final"

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


class ReverseTask(DigitsTask, GeneratedTask):
    """Reversing digits: "Reverse: 53914" -> "41935". The difficulty is the number of digits."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        digits = random_digits(rng, difficulty)
        return f"Reverse: {digits}", digits[::-1]


class SortTask(DigitsTask, GeneratedTask):
    """Sorting digits: "Sort: 53914" -> "13459". The difficulty is the number of digits."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        digits = random_digits(rng, difficulty)
        return f"Sort: {digits}", "".join(sorted(digits))

    def split_key(self, question: str) -> str:
        """Sorts the digits: "Sort: 312" held out and "Sort: 321" trained on, with the same answer, would be a leak."""
        return "".join(sorted(question.removeprefix("Sort: ")))
