"""Reversing letters: "Reverse: k f a q" -> "q a f k". The difficulty is the number of letters."""

from __future__ import annotations

import random
import re
import string

from nmoe.errors import UserError
from nmoe.rl.problem import Problem
from nmoe.rl.tasks.task import QuestionTask

_LETTERS = re.compile(r"[a-z]( [a-z])*")


class ReverseTask(QuestionTask):
    """Letters are spaced out so that each is a token of its own, whatever the vocabulary has merged."""

    bare_final = True

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        letters = [rng.choice(string.ascii_lowercase) for _ in range(difficulty)]
        return f"Reverse: {' '.join(letters)}", " ".join(reversed(letters))

    def check_gold(self, problem: Problem) -> None:
        if not _LETTERS.fullmatch(problem.gold):
            raise UserError(
                f"the gold answer of a reverse problem is lower-case letters with single spaces between, "
                f"not {problem.gold!r}"
            )

    def correct(self, problem: Problem, answer: str) -> bool:
        return answer.strip() == problem.gold
