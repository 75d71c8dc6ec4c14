"""Generated tasks over numbers, in plain English: see `nmoe.envs.tasks.plain` for how an answer is read."""

from __future__ import annotations

import random
import re

from nmoe.envs.tasks.plain import ChoiceTask, NumberTask, OrderTask
from nmoe.envs.tasks.task import GeneratedTask
from nmoe.types import Problem

_NUMBER = re.compile(r"\d+")
_CONTRARY = "smaller|smallest|less|lesser|least|lower|lowest"  # than the larger number, or the largest
_NAMES = ("Tom", "Anna", "Ben", "Maria", "Sam", "Lucy", "Peter", "Emma")
_THINGS = ("apples", "books", "coins", "pens", "stamps", "cups", "balls", "eggs")


def _different(rng: random.Random, digits: int, count: int) -> list[int]:
    """Different numbers of so many digits, of at most 18: longer ones are beyond what `random.sample` counts to."""
    digits = min(digits, 18)
    return rng.sample(range(0 if digits == 1 else 10 ** (digits - 1), 10**digits), count)


def _sorted_numbers(question: str) -> str:
    return " ".join(sorted(_NUMBER.findall(question), key=int))


class CompareTask(ChoiceTask, GeneratedTask):
    """ "Which number is larger, 34 or 72?" -> "72". The difficulty is the number of digits of both, at most 18."""

    contrary = _CONTRARY

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        left, right = _different(rng, difficulty, 2)
        return f"Which number is larger, {left} or {right}? Answer with one number.", str(max(left, right))

    def split_key(self, question: str) -> str:
        """Sorts the numbers: the same two in the other order are the same problem."""
        return _sorted_numbers(question)


class LargestTask(ChoiceTask, GeneratedTask):
    """ "Which of the numbers 34, 72 and 15 is the largest?" -> "72". The difficulty is the number of digits."""

    contrary = _CONTRARY

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        first, second, third = _different(rng, difficulty, 3)
        question = f"Which of the numbers {first}, {second} and {third} is the largest? Answer with one number."
        return question, str(max(first, second, third))

    def split_key(self, question: str) -> str:
        return _sorted_numbers(question)


class SumsTask(NumberTask, GeneratedTask):
    """ "What is 57 + 8?" -> "65". The first number is at most 20 times the difficulty, the second at most 4 times."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        left, right = rng.randint(1, 20 * difficulty), rng.randint(1, 4 * difficulty)
        return f"What is {left} + {right}? Answer with one number.", str(left + right)

    def split_key(self, question: str) -> str:
        return _sorted_numbers(question)


class DifferencesTask(NumberTask, GeneratedTask):
    """ "What is 65 - 8?" -> "57". The numbers are as in sums. No number of the question is the answer."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        while True:
            left, right = rng.randint(2, 20 * difficulty), rng.randint(1, 4 * difficulty)
            if left > right and left != 2 * right:
                return f"What is {left} - {right}? Answer with one number.", str(left - right)


class NextNumberTask(NumberTask, GeneratedTask):
    """ "Which number comes right after 419?" -> "420". The difficulty is the number of digits."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        number = rng.randrange(10 ** (difficulty - 1), 10**difficulty)
        return f"Which number comes right after {number}? Answer with one number.", str(number + 1)


class ParityTask(ChoiceTask, GeneratedTask):
    """ "Is 47 odd or even?" -> "odd". The difficulty is the number of digits."""

    def options(self, problem: Problem) -> list[str]:
        return ["odd", "even"]

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        number = rng.randrange(10 ** (difficulty - 1), 10**difficulty)
        return f"Is the number {number} odd or even? Answer with one word.", "odd" if number % 2 else "even"


class OrderNumbersTask(OrderTask, GeneratedTask):
    """ "Write these numbers from smallest to largest: 34, 72, 15." -> "15, 34, 72". The difficulty is the number of digits."""

    def options(self, problem: Problem) -> list[str]:
        return _NUMBER.findall(problem.question)

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        while True:
            numbers = _different(rng, difficulty, 3)
            if numbers != sorted(numbers):
                break
        shown, gold = (", ".join(map(str, one)) for one in (numbers, sorted(numbers)))
        return f"Write these numbers from smallest to largest: {shown}. Answer with the numbers alone.", gold

    def split_key(self, question: str) -> str:
        return _sorted_numbers(question)


class WordProblemsTask(NumberTask, GeneratedTask):
    """ "Tom has 7 apples and gets 5 more. How many apples does Tom have now?" -> "12". Numbers are at most 5 times the
    difficulty. No number of the question is the answer."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        name, things, most = rng.choice(_NAMES), rng.choice(_THINGS), 5 * difficulty
        if rng.random() < 0.5:
            has, more = rng.randint(1, most), rng.randint(1, most)
            told, gold = f"has {has} {things} and gets {more} more", has + more
        else:
            gives, keeps = rng.sample(range(1, most + 1), 2)
            told, gold = f"has {gives + keeps} {things} and gives away {gives}", keeps
        return f"{name} {told}. How many {things} does {name} have now? Answer with one number.", str(gold)
