"""What decides where answers of the same value may differ in form: settings of a task, and what its question asks for.

Policy()                                       pairs without a question, as `nmoe grade` has them
Policy(answer_order="as_gold")                 "2, 1" is wrong for "1, 2"
Policy(question="Simplify $\\sqrt{180}$.")      what the question contains is no answer to it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

POLICY_KEYS = ("answer_order", "units")
"""The settings of a task pool that are of a policy."""

AnswerOrder = Literal["any", "as_gold"]
Units = Literal["asked", "as_gold", "any"]


@dataclass(frozen=True)
class Policy:
    """`answer_order`: whether a list without brackets, "1, 2", has an order. A list of tuples has none, and values with names
    of their own always have.

    `units`: which unit an answer may add to a gold without one: one that the question names as its only one ("asked"), none
    ("as_gold"), or all but those that make another number of it, like % and "dozen" ("any").

    `question`: None where it is not known. With it an answer that repeats an expression of the question is none, nor is one
    that is still to be worked out where the gold is a number.
    """

    answer_order: AnswerOrder = "any"
    units: Units = "asked"
    question: str | None = None

    @property
    def arguments(self) -> tuple[AnswerOrder, Units, str | None]:
        """For a worker: `Policy(*arguments)` is this one."""
        return self.answer_order, self.units, self.question


DEFAULT = Policy()
