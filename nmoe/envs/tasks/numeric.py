"""Tasks over digits and numbers: rows of digits compared as text, numbers compared by value, and a guessed number.

In tokenizers that nmoe trains each digit is one token, so that a row of digits has one spelling. By value, 1,000 equals 1000.0,
and a half equals 0.5."""

from __future__ import annotations

import random
import re
from fractions import Fraction

from nmoe.envs.tasks.conversation import AssistantTurn, ConversationTask, Response, State
from nmoe.envs.tasks.task import AnswerForm, Attempt, GeneratedTask, QuestionTask
from nmoe.errors import UserError, shown
from nmoe.grading.math.equivalence import settle
from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.numbers import read_number
from nmoe.grading.math.question import Policy
from nmoe.types import Problem, Verdict

_DIGITS = re.compile(r"[0-9]+")


def random_digits(rng: random.Random, count: int) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(count))


_SAME_DIGITS = Verdict.of(True, "exact", "the same digits")
_OTHER_DIGITS = Verdict.of(False, "exact", "other digits")


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
        return _SAME_DIGITS if attempt.answer.strip() == problem.gold else _OTHER_DIGITS


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
        """Returns the sorted digits as the key of the split: "Sort: 312" held out and "Sort: 321" trained on, with the same answer,
        would be a leak.
        """
        return "".join(sorted(question.removeprefix("Sort: ")))


class NumericTask(QuestionTask):
    """The base of tasks whose answer is a number, compared by value: gsm8k, add, arithmetic and sum.

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


class Gsm8kTask(NumericTask):
    """Grade-school word problems with one number as the answer (Cobbe et al. 2021, arXiv:2110.14168)."""

    answer_form: AnswerForm = "boxed"


class AddTask(NumericTask, GeneratedTask):
    """Adding two numbers: "Add: 47 + 85" -> "132". The difficulty is the number of digits of each."""

    answer_form: AnswerForm = "final"

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        smallest = 0 if difficulty == 1 else 10 ** (difficulty - 1)  # no leading zeros
        left, right = (rng.randrange(smallest, 10**difficulty) for _ in range(2))
        return f"Add: {left} + {right}", str(left + right)

    def split_key(self, question: str) -> str:
        """Returns the sorted operands as the key of the split: "Add: 47 + 85" held out and "Add: 85 + 47" trained on would be a
        leak.
        """
        return " + ".join(sorted(question.removeprefix("Add: ").split(" + "), key=int))


class SumTask(NumericTask, GeneratedTask):
    """Adding up digits, one after the other: "Sum: 4+7+2+5" -> "18". The difficulty is the number of additions."""

    answer_form: AnswerForm = "final"

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        # No zeros: every addition changes the total, so that a missing one shows.
        numbers = [rng.randint(1, 9) for _ in range(difficulty + 1)]
        return f"Sum: {'+'.join(map(str, numbers))}", str(sum(numbers))

    def split_key(self, question: str) -> str:
        """Returns the sorted numbers as the key of the split: the same sum in another order is the same problem."""
        return "+".join(sorted(question.removeprefix("Sum: ").split("+"), key=int))


class ArithmeticTask(NumericTask, GeneratedTask):
    """Evaluating an expression: "Compute: 3 + 4 * 2" -> "11". The difficulty is the number of operators.

    Operands are digits. * binds before + and -, which are evaluated from left to right. The answer is an integer.
    """

    answer_form: AnswerForm = "final"

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        operands = [rng.randrange(10) for _ in range(difficulty + 1)]
        operators = [rng.choice("+-*") for _ in range(difficulty)]
        expression = str(operands[0])
        done, product = 0, operands[0]  # the value so far is `done` plus a product that may still grow
        for operator, operand in zip(operators, operands[1:], strict=True):
            expression += f" {operator} {operand}"
            if operator == "*":
                product *= operand
            else:
                done, product = done + product, operand if operator == "+" else -operand
        return f"Compute: {expression}", str(done + product)


_TRIES = re.compile(r"\b([1-9][0-9]{0,3}) tries\b")
_NUMBER = re.compile(r"-?[0-9]{1,400}")
# The number of tries if the question of a dataset's record names none.
_DEFAULT_TRIES = 10


class GuessTask(ConversationTask, NumericTask, GeneratedTask):
    """Guessing a number by hints: "Guess: 40 to 47, 4 tries", then "higher" or "lower" until it is found or no tries are left.

    There are 2**(difficulty + 1) numbers, and as many tries as bisection needs at worst.
    """

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
    """Returns the value of a gold number, which a dataset may write as 1,000 or 43.0."""
    number = read_number(normalize(gold))
    assert number is not None, "check_gold refuses a gold that is no number"
    return number.value
