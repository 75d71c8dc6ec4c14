"""Guessing a number by hints: "Guess: 40 to 47, 4 tries", then "higher" or "lower" until it is found or no tries are left.

There are 2**(difficulty + 1) numbers, and one try more than bisection needs.
"""

from __future__ import annotations

import random
import re
from fractions import Fraction

from nmoe.envs.tasks.conversation import AssistantTurn, ConversationTask, Response, State
from nmoe.envs.tasks.numeric import NumericTask
from nmoe.envs.tasks.task import AnswerForm, GeneratedTask
from nmoe.errors import UserError
from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.numbers import read_number
from nmoe.types import Problem

_TRIES = re.compile(r"\b([1-9][0-9]{0,3}) tries\b")
_NUMBER = re.compile(r"-?[0-9]{1,400}")
# The number of tries if the question of a dataset's record names none.
_DEFAULT_TRIES = 10


class GuessTask(ConversationTask, NumericTask, GeneratedTask):
    answer_form: AnswerForm = "final"

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        numbers = 2 ** (difficulty + 1)
        first = rng.randrange(1, max(1000, numbers) - numbers + 2)
        hidden = rng.randrange(first, first + numbers)
        return f"Guess: {first} to {first + numbers - 1}, {difficulty + 2} tries", str(hidden)

    def check_gold(self, problem: Problem) -> None:
        super().check_gold(problem)
        if _value(problem.gold).denominator != 1:
            raise UserError(f"the hidden number of a problem of type guess is a whole number, not {problem.gold!r}")

    def start(self, problem: Problem) -> State:
        named = _TRIES.search(problem.question)
        return {"left": int(named[1]) if named else _DEFAULT_TRIES}

    def respond(self, problem: Problem, state: State, said: AssistantTurn, rng: random.Random) -> Response:
        left = {"left": state["left"] - 1}
        guess = said.answer.strip()
        if not _NUMBER.fullmatch(guess):
            hint = "a number, please"
        elif int(guess) == (hidden := _value(problem.gold)):
            return Response(left, None, reward=1.0)
        else:
            hint = "higher" if int(guess) < hidden else "lower"
        return Response(left, hint if left["left"] > 0 else None)


def _value(gold: str) -> Fraction:
    """The value of a gold, which a dataset may write as 1,000 or 43.0."""
    number = read_number(normalize(gold))
    assert number is not None, "check_gold refuses a gold that is no number"
    return number.value
