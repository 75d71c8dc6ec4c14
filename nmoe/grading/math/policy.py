r"""The policy for answers that have the gold's value in another form: settings of a task, and what its question asks for.

Policy()                                        pairs without a question, as in `nmoe grade`
Policy(answer_order="as_gold")                  "2, 1" is wrong for "1, 2"
Policy(question="Simplify $\sqrt{180}$.")       an expression from the question does not answer it
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
    """Which differences in form are allowed.

    `answer_order`: whether a list without brackets, "1, 2", is ordered. A list of tuples is never ordered, and named values
    are always compared by name.

    `units`: which unit an answer may add to a gold without one. "asked": the one that the question names, if it names only
    one. "as_gold": none. "any": all but those that change the number, like % and "dozen".

    `question`: None to compare two texts by value. Otherwise the answer is to a question, "" if its text is unknown: it has to be
    worked out (`nmoe.grading.math.worked`), and an expression of the question is no answer.
    """

    answer_order: AnswerOrder = "any"
    units: Units = "asked"
    question: str | None = None

    @property
    def arguments(self) -> tuple[AnswerOrder, Units, str | None]:
        """The arguments for a worker: `Policy(*arguments)` equals this policy."""
        return self.answer_order, self.units, self.question


DEFAULT = Policy()
