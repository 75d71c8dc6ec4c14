"""Lenient grading: the answer wherever it stands in a completion, whether or not it ended or has the form asked for.

A base model often knows an answer and says it in a sentence, or goes on writing after it. Graded strictly, a model that learned
the form alone then seems to have learned the task. `part_gain` separates the two.
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
    """The task's verdict on the answer that a text commits to.

    A task of plain questions reads the text itself. Other answers are a box, what follows "the answer is", or the last number; for
    a task whose answers are texts, the whole text."""
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
    """The parts of a gain in the share of right answers: `Gain(form=0.31, given_form=0.44, without_form=0.0)`; the three sum to
    the gain."""

    form: float
    given_form: float
    without_form: float


def part_gain(before: Sequence[tuple[bool, bool]], after: Sequence[tuple[bool, bool]]) -> Gain | None:
    """Parts the gain of `after` over `before`, both lists of (in form, right), into more answers in form and more of them right.

    The share of right answers is f * c + (1 - f) * d, with f the share in form, and c and d the rates of right answers among
    those in form and the others. Each change is weighted by the mean of the other factor before and after, so that the parts
    sum to the gain (Kitagawa 1955, "Components of a Difference Between Two Rates"). Where a model has no answer of a kind, its
    rate is taken to be the other model's. None if neither has one in form. Raises ValueError for an empty list.
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
    """Two rates; a missing one takes the other's value."""
    known = [rate for rate in (one, other) if rate is not None] or [0.0]
    return (known[0] if one is None else one), (known[0] if other is None else other)


def _rates(answers: Sequence[tuple[bool, bool]]) -> tuple[float, float | None, float | None]:
    """The share in form, and the rates of right answers among those in form and among the others."""
    if not answers:
        raise ValueError("no answers, so no rates")
    kinds = {kind: [right for in_form, right in answers if in_form is kind] for kind in (True, False)}
    in_form, others = (sum(found) / len(found) if found else None for found in (kinds[True], kinds[False]))
    return len(kinds[True]) / len(answers), in_form, others
