"""Sorting digits: "Sort: 53914" -> "13459". The difficulty is the number of digits."""

from __future__ import annotations

import random
import re

from nmoe.errors import UserError
from nmoe.rl.problem import Problem
from nmoe.rl.tasks.task import QuestionTask

_DIGITS = re.compile(r"[0-9]+")


class SortTask(QuestionTask):
    """The answer is the digits themselves: "0135" is not the number 135, so only the same text is correct."""

    bare_final = True

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        digits = [str(rng.randrange(10)) for _ in range(difficulty)]
        return f"Sort: {''.join(digits)}", "".join(sorted(digits))

    def check_gold(self, problem: Problem) -> None:
        if not _DIGITS.fullmatch(problem.gold):
            raise UserError(f"the gold answer of a sort problem is a row of digits, not {problem.gold!r}")

    def correct(self, problem: Problem, answer: str) -> bool:
        return answer.strip() == problem.gold
