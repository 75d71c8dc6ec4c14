r"""Short questions in plain English for small chat models, with answers that are read wherever they stand in a message.

A model that was not asked for a format says "12", "The sum is 12." or "7 + 5 = 12, because ...". All three are the answer 12. So
the whole message goes to `verify`, and the readers below find the one answer that it commits to:

    number    after the last "is", "are", "equals", "=" or ":"; else the last number
    choice    after the last "is", "=" or ":"; else the only option that is named, words after "than" aside
    letter    after the last "is", "=" or ":"; else the only letter that stands alone
    order     the last options that are named, as many as there are

A message gets one reading, so that listing candidates earns no more than a guess. Repeating the question earns nothing: a
choice that names two options without a statement is no answer, and no question lists its options in the right order. What follows
"not" or "anything but", or stands before "is wrong", is no answer either, and "34 is smaller than 72" says 72 where the larger one
is asked for. The same reading applies to a message that was cut, for an evaluation that separates knowledge from form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask
from nmoe.errors import UserError
from nmoe.grading.denial import without_denied
from nmoe.types import Problem, Verdict

# A longer message is not read: no short answer needs it, and a verdict has bounded time.
MAX_CHARS = 20_000
_BEFORE = r"[\s\"'“‘*_(\[{$]*"
_STATED = rf"(?:\b(?:is|are|be|equals?)\b|=|:){_BEFORE}"
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
# "= 7 + 3 + 2" and "is 7 times" state no result.
_STATED_NUMBER = re.compile(rf"{_STATED}({_NUMBER})(?![\d.,]*\d|\s*(?:[-+*/x×−]|times|plus|minus)\s*\d)", re.IGNORECASE)
_ANY_NUMBER = re.compile(_NUMBER)
# In 'r', and not in "it's" and "I'm".
_LETTER = r"(?<!\w)(?<!\w['’])([A-Za-z])(?!\w|['’]\w)"
# An article is no letter: "is a consonant", "I think".
_STATED_LETTER = re.compile(rf"{_STATED}(?:the letter[\s\"'“‘*_]*)?(?!a [a-z]|I [a-z]){_LETTER}", re.IGNORECASE)
_ALONE = re.compile(rf"(?!a [a-z]|I [a-z]){_LETTER}")
_THAN_NUMBER = re.compile(
    rf"\b(?:less|more|fewer|greater|larger|smaller|bigger|higher|lower) than\W+{_NUMBER}", re.IGNORECASE
)


def read_number(text: str) -> str | None:
    """Returns the number that a message gives as its answer, without thousands commas and trailing zeros; None if it names none."""
    text = _THAN_NUMBER.sub(" ", without_denied(text[-MAX_CHARS:].replace("−", "-")))
    found = _STATED_NUMBER.findall(text) or _ANY_NUMBER.findall(text)
    if not found:
        return None
    number = found[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def read_choice(text: str, options: Sequence[str], contrary: str = "") -> str | None:
    """Returns the option that a message chooses, compared without case; None if it names none, or several without a statement.
    `contrary` are words, joined by `|`, that mean the opposite of the question's word: an option described by one is rejected,
    and of two options the other is then chosen.
    """
    text = text[-MAX_CHARS:]
    either = "|".join(re.escape(one) for one in options)
    word = rf"(?<![\w.-])({either})(?![\w-]|[.,]\d)"
    if contrary:
        text = _without_contrary(text, word, options, contrary)
    text = without_denied(text, word)
    found = re.findall(f"{_STATED}{word}", text, re.IGNORECASE)
    if not found:
        others = re.sub(rf"\bthan\W+{word}", " ", text, flags=re.IGNORECASE)
        named = re.findall(word, others, re.IGNORECASE)
        found = named if len({one.casefold() for one in named}) == 1 else []
    return next((one for one in options if found and one.casefold() == found[-1].casefold()), None)


def _without_contrary(text: str, word: str, options: Sequence[str], contrary: str) -> str:
    """Returns the message with statements such as "34 is smaller than 72" and "the smaller number is 34" replaced by the other of
    two options, here 72, or removed if there are more options.
    """
    called = (
        rf"{word}\W+(?:is|are|has|have)\s+(?:the\s+)?(?:{contrary})\b(?:\s+\w+){{0,2}}?(?:\s+than\W+{word})?",
        rf"\b(?:{contrary})\b(?:\s+(?!is\b)\w+){{0,6}}?\s+is{_BEFORE}{word}",
    )

    def other(match: re.Match[str]) -> str:
        rest = [one for one in options if one.casefold() != match[1].casefold()]
        return f" {rest[0]} " if len(rest) == 1 else " "

    for one in called:
        text = re.sub(one, other, text, flags=re.IGNORECASE)
    return text


def read_letter(text: str) -> str | None:
    """Returns the letter that a message gives as its answer, in lower case; None if it names none, or several without a
    statement."""
    text = without_denied(text[-MAX_CHARS:], _LETTER)
    stated = _STATED_LETTER.findall(text)
    letters = {one.lower() for one in _ALONE.findall(text)}
    if stated:
        return str(stated[-1]).lower()
    return letters.pop() if len(letters) == 1 else None


def read_order(text: str, options: Sequence[str]) -> str | None:
    """Returns the options in the order in which a message names them last, in lower case and joined by ", "; None if the last names
    in it are not all of the options.
    """
    word = rf"(?<![\w-])(?:{'|'.join(re.escape(one) for one in options)})(?!\w)"
    text = without_denied(text[-MAX_CHARS:], rf"{word}(?:(?:\W{{1,3}}|, and ){word}){{0,8}}+")
    named = re.findall(word, text, re.IGNORECASE)
    last = [one.casefold() for one in named[-len(options) :]]
    return ", ".join(last) if sorted(last) == sorted(one.casefold() for one in options) else None


class PlainTask(QuestionTask):
    """The base of tasks in plain English: `read` extracts the answer from the whole message, and the answer is compared with the
    gold.
    """

    answer_form: AnswerForm = "whole"
    reads_message = True

    def check_gold(self, problem: Problem) -> None:
        if self.read(problem, problem.gold) != problem.gold:
            raise UserError(
                f"the gold answer {problem.gold!r} of a {problem.task_type} problem does not read as itself"
            )

    def read(self, problem: Problem, text: str) -> str | None:
        """Returns the answer that a message commits to; None if there is none."""
        raise NotImplementedError

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        answer = self.read(problem, attempt.answer)
        return Verdict.of(answer == problem.gold, "plain", "no single answer" if answer is None else f"read {answer!r}")

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        readings = [self.read(problem, answer) for answer in (one, other)]
        return readings[0] == readings[1] if readings[0] is not None else one.strip() == other.strip()


class NumberTask(PlainTask):
    """A task whose answer is a number."""

    def read(self, problem: Problem, text: str) -> str | None:
        return read_number(text)

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, str(int(problem.gold) + 1)


class ChoiceTask(PlainTask):
    """A task whose answer is one of the options that the question names."""

    contrary = ""
    """Words, joined by `|`, that say the opposite of what the question asks for."""

    def options(self, problem: Problem) -> list[str]:
        """Returns the options: by default the numbers in the question."""
        return re.findall(r"\d+", problem.question)

    def read(self, problem: Problem, text: str) -> str | None:
        return read_choice(text, self.options(problem), self.contrary)

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, next(one for one in self.options(problem) if one != problem.gold)


class LetterTask(PlainTask):
    """A task whose answer is a letter, in lower case."""

    def read(self, problem: Problem, text: str) -> str | None:
        return read_letter(text)

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, "b" if problem.gold != "b" else "c"


class OrderTask(PlainTask):
    """A task whose answer is the options in the right order, joined by ", "."""

    def options(self, problem: Problem) -> list[str]:
        raise NotImplementedError

    def read(self, problem: Problem, text: str) -> str | None:
        return read_order(text, self.options(problem))

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, ", ".join(reversed(problem.gold.split(", ")))
