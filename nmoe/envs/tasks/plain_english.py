"""Generated tasks over numbers, words and letters, in plain English; `nmoe.envs.tasks.plain` says how an answer is read.

The words come from `words.txt`: common English nouns of four to eight letters, none a part of the wording of a question."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

from nmoe.envs.tasks.plain import MAX_CHARS, ChoiceTask, LetterTask, NumberTask, OrderTask, PlainTask
from nmoe.envs.tasks.task import GeneratedTask
from nmoe.errors import UserError
from nmoe.grading.denial import without_denied
from nmoe.types import Problem

_NUMBER = re.compile(r"\d+")
_CONTRARY = "smaller|smallest|less|lesser|least|lower|lowest"  # than the larger number, or the largest
_NAMES = ("Tom", "Anna", "Ben", "Maria", "Sam", "Lucy", "Peter", "Emma")
_THINGS = ("apples", "books", "coins", "pens", "stamps", "cups", "balls", "eggs")


def _different(rng: random.Random, digits: int, count: int) -> list[int]:
    """Returns `count` distinct random numbers with `digits` digits, at most 18, because `random.sample` cannot draw from longer
    ranges.
    """
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
        """Returns the sorted numbers as the key of the split: the same two numbers in the other order are the same problem."""
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
            story, gold = f"has {has} {things} and gets {more} more", has + more
        else:
            gives, keeps = rng.sample(range(1, most + 1), 2)
            story, gold = f"has {gives + keeps} {things} and gives away {gives}", keeps
        return f"{name} {story}. How many {things} does {name} have now? Answer with one number.", str(gold)


_QUOTED = re.compile(r"\"([a-z]+)\"")
_LISTED = re.compile(r": ([a-z, ]+)[.?]")
_ADJECTIVES = ("big", "bright", "cold", "dark", "famous", "new", "quiet", "rare", "small", "strange", "warm", "wild")
_ORDINALS = ("first", "second", "third", "fourth")


@cache
def words() -> tuple[str, ...]:
    """Returns the words of `words.txt`, in alphabetical order."""
    return tuple((Path(__file__).parent / "words.txt").read_text().split())


def _listed(question: str) -> list[str]:
    """Returns the words listed in a question: "...: river, apple." -> ["river", "apple"]."""
    found = _LISTED.search(question)
    return [] if found is None else found[1].split(", ")


class LettersTask(LetterTask, GeneratedTask):
    """ "What is the third letter of the word "river"?" -> "v". A difficulty of 1 asks for the first letter, 2 for one of the
    first two, and so on; from 4 on one of the first three or the last."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        word, index = rng.choice(words()), rng.randrange(min(difficulty, 4))
        which, letter = ("last", word[-1]) if index == 3 else (_ORDINALS[index], word[index])
        return f'What is the {which} letter of the word "{word}"? Answer with one letter.', letter


class CountWordsTask(NumberTask, GeneratedTask):
    """ "How many words are in this list: river, apple?" -> "2". There are two words, and at most as many more as the difficulty."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        chosen = rng.sample(words(), 2 + rng.randint(0, difficulty))
        return f"How many words are in this list: {', '.join(chosen)}? Answer with one number.", str(len(chosen))

    def split_key(self, question: str) -> str:
        return " ".join(sorted(_listed(question)))


class OrderWordsTask(OrderTask, GeneratedTask):
    """ "Sort these words in alphabetical order: river, apple." -> "apple, river". There is one word more than the difficulty, and
    at most five."""

    def options(self, problem: Problem) -> list[str]:
        return _listed(problem.question)

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        while True:
            chosen = rng.sample(words(), min(difficulty, 4) + 1)
            if chosen != sorted(chosen):
                break
        question = f"Sort these words in alphabetical order: {', '.join(chosen)}. Answer with the words alone."
        return question, ", ".join(sorted(chosen))

    def split_key(self, question: str) -> str:
        return " ".join(sorted(_listed(question)))


class _PairTask(ChoiceTask):
    """The base of questions about two words in quotation marks."""

    def options(self, problem: Problem) -> list[str]:
        # A hint that follows the question may have quotation marks, too.
        return _QUOTED.findall(problem.question)[:2]

    def split_key(self, question: str) -> str:
        return " ".join(sorted(_QUOTED.findall(question)))


class LongerWordTask(_PairTask, GeneratedTask):
    """ "Which word has more letters, "river" or "apricot"?" -> "apricot". The lengths differ by at least two; the difficulty is not
    used."""

    contrary = "shorter|shortest|fewer|fewest|less|least|smaller|smallest"

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        while True:
            left, right = rng.sample(words(), 2)
            if abs(len(left) - len(right)) >= 2:
                return f'Which word has more letters, "{left}" or "{right}"? Answer with one word.', max(
                    left, right, key=len
                )


class AlphabeticalTask(_PairTask, GeneratedTask):
    """ "Which word comes first in the alphabet, "river" or "apple"?" -> "apple". The first letters differ; the difficulty is not
    used."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        while True:
            left, right = rng.sample(words(), 2)
            if left[0] != right[0]:
                question = f'Which word comes first in alphabetical order, "{left}" or "{right}"? Answer with one word.'
                return question, min(left, right)


class CapitalsTask(PlainTask, GeneratedTask):
    """ "Write the words "river stone" in capital letters." -> "RIVER STONE". There are as many words as the difficulty, at most
    four. The answer is the only text in capitals, or the last one."""

    def read(self, problem: Problem, text: str) -> str | None:
        count = problem.gold.count(" ") + 1
        word = r"\b(?-i:[A-Z]{2,})\b"
        found = re.findall(word, without_denied(text[-MAX_CHARS:], f"{word}(?: {word}){{0,4}}+"))
        return " ".join(found[-count:]) if len(found) >= count else None

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, problem.gold.lower()

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        chosen = " ".join(rng.sample(words(), min(difficulty, 4)))
        noun = "words" if " " in chosen else "word"
        return f'Write the {noun} "{chosen}" in capital letters. Answer with the {noun} alone.', chosen.upper()


class ThreeWordsTask(PlainTask, GeneratedTask):
    """ "Describe a quiet river in exactly three words." -> any three different words, none of them in the question.

    It is an instruction about form: the content is not graded. The difficulty is not used.
    """

    _GOLD = "known to everyone"
    one_answer = False

    def read(self, problem: Problem, text: str) -> str | None:
        """Returns the gold if the message follows the instruction, else None."""
        said = [word.casefold() for word in re.sub(r"[.,!;:\"*]", " ", text[:MAX_CHARS]).split()]
        plain = all(re.fullmatch(r"[a-z][a-z'’-]*", word) for word in said)
        asked = set(re.findall(r"[a-z]+", problem.question.casefold()))
        return self._GOLD if plain and len(said) == len(set(said) - asked) == 3 else None

    def check_gold(self, problem: Problem) -> None:
        if problem.gold != self._GOLD:
            raise UserError(
                f"the gold answer of a three_words problem is {self._GOLD!r}, which stands for any three words"
            )

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return self._GOLD, "everyone"

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        return f"Describe a {rng.choice(_ADJECTIVES)} {rng.choice(words())} in exactly three words.", self._GOLD
