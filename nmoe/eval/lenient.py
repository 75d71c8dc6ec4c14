"""Lenient grading: accepts a right answer anywhere in a completion, even if it was cut or lacks the required format.

A base model often states an answer in a sentence, or continues to write after it. Under strict grading, a model that
learned only the format then seems to have learned the task. `part_gain` separates the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nmoe.envs.grade import read_answer
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.plain import PlainTask
from nmoe.grading.extraction import from_final
from nmoe.text.renderers import ParsedAnswer
from nmoe.types import Problem, Verdict


async def lenient_verdict(problem: Problem, text: str) -> Verdict | None:
    r"""Returns the task's verdict on the answer that a text gives in any form; None if it gives no answer.

    The answer is the content of \boxed{}, the text after "the answer is", or the last number; for tasks whose answers
    are texts, it is the whole text. A task of plain questions extracts the answer by its own rule.
    """
    task = TASKS[problem.task_type]
    if isinstance(task, PlainTask):
        answer = task.read(problem, text)
    elif task.answer_form != "boxed":
        answer = from_final(text, bare_final=True).answer
    else:
        answer = read_answer(ParsedAnswer(text), task, prose=True).extraction.answer
    return None if answer is None else await task.verify(problem, Attempt(answer))


@dataclass(frozen=True)
class Gain:
    """The parts of a gain in accuracy: `Gain(form=0.31, given_form=0.44, without_form=0.0)`. Their sum is the gain.

    `form` comes from more answers in the required format, `given_form` from more right answers among these, and
    `without_form` from more right answers among the others.
    """

    form: float
    given_form: float
    without_form: float


def part_gain(before: Sequence[tuple[bool, bool]], after: Sequence[tuple[bool, bool]]) -> Gain | None:
    """Splits the gain in accuracy from `before` to `after` into more well-formed answers and more right answers among them.

    Both arguments list a pair (well-formed, right) for each answer. The accuracy is f * c + (1 - f) * d, where f is the
    share of well-formed answers, and c and d are the rates of right answers among well-formed and other answers. Each
    change is weighted by the mean of the other factor before and after, so that the parts sum to the gain (Kitagawa
    1955, "Components of a Difference Between Two Rates"). If one side lacks well-formed (or other) answers, their rate
    is taken from the other side. Returns None if neither side has a well-formed answer. Raises ValueError for an empty
    list.
    """
    (f, c, d), (g, e, h) = _rates(before), _rates(after)
    if c is None and e is None:
        return None
    c, e = _both(c, e)
    d, h = _both(d, h)  # where all answers are in form neither has a rate, and it has no weight
    return Gain(
        form=(g - f) * ((c + e) - (d + h)) / 2,
        given_form=(f + g) / 2 * (e - c),
        without_form=(1 - (f + g) / 2) * (h - d),
    )


def _both(one: float | None, other: float | None) -> tuple[float, float]:
    """Returns both rates, with a missing one replaced by the other; 0 if both are missing."""
    known = [rate for rate in (one, other) if rate is not None] or [0.0]
    return (known[0] if one is None else one), (known[0] if other is None else other)


def _rates(answers: Sequence[tuple[bool, bool]]) -> tuple[float, float | None, float | None]:
    """Returns the share of well-formed answers, and the rates of right answers among these and among the others (None
    without answers)."""
    if not answers:
        raise ValueError("no answers, so no rates")
    kinds = {kind: [right for in_form, right in answers if in_form is kind] for kind in (True, False)}
    in_form, others = (sum(found) / len(found) if found else None for found in (kinds[True], kinds[False]))
    return len(kinds[True]) / len(answers), in_form, others
