"""Competition mathematics with a short answer in LaTeX (Hendrycks et al. 2021, arXiv:2103.03874)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nmoe.errors import UserError
from nmoe.rl.grading.answers import grade_answer
from nmoe.rl.grading.equivalence import settle
from nmoe.rl.grading.extraction import last_boxed
from nmoe.rl.grading.normalization import MAX_ANSWER_CHARS, normalize
from nmoe.rl.grading.numbers import read_number
from nmoe.rl.grading.verdict import Verdict
from nmoe.rl.problem import Metadata, Problem
from nmoe.rl.tasks.task import Attempt, QuestionTask, group_metadata

_ANY_ORDER = re.compile(r"separated? (?:\w+ ){0,3}(?:by|with) commas?|in any order", re.IGNORECASE)
_IN_ORDER = re.compile(
    r"\border(?:ed)? (?:from|of)|respectively|(?:in|de)creasing|(?:a|de)scending|smallest|largest", re.IGNORECASE
)

# What is left to compute. A fraction is a number, and so is a decimal that repeats.
_UNEVALUATED = re.compile(r"[+*^!]|[\d})]\s*-|\\(?!(?:[dt]?frac|overline|text|mathrm|left|right)(?![A-Za-z]))[A-Za-z]+")


class MathTask(QuestionTask):
    r"""Equivalence of answers (docs/grading.md), with what the question adds to it.

    An expression that the question itself contains is not an answer to it: `\sqrt{180}` is as much as the gold
    `6\sqrt{5}`, but "Simplify $\sqrt{180}$" asks for more. Nor is an expression where the gold answer is a number: to a policy
    that finds that `\binom{8}{4}+0` pays, counting is a detour. And where the question wants a list "separated by commas" and no
    particular order, any order will do.
    """

    bare_final = False
    record_fields = ("level", "subject", "type")
    gold_types = (str, int, float)

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        """Keeps level and subject, by which evaluations and metrics are told apart."""
        return question, gold, group_metadata(record)

    def check_gold(self, problem: Problem) -> None:
        if len(problem.gold) > MAX_ANSWER_CHARS:
            raise UserError(
                f"the gold answer has {len(problem.gold)} characters, more than {MAX_ANSWER_CHARS}: "
                "is it a whole solution? choose a gold_extractor"
            )
        # No answer would ever be equal to it.
        if "####" in problem.gold or last_boxed(problem.gold) is not None:
            raise UserError(f"the gold answer {problem.gold!r:.80} is a solution; choose a gold_extractor")
        if not normalize(problem.gold):
            raise UserError(f"nothing is left of the gold answer {problem.gold!r} without its typesetting")

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, f"({problem.gold}) + 1"

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        if one.strip() == other.strip():
            return True
        if max(len(one), len(other)) > MAX_ANSWER_CHARS:
            return False
        return (await grade_answer(one, other, any_order=_in_any_order(problem))).outcome == "correct"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        any_order = _in_any_order(problem)
        verdict = settle(problem.gold, attempt.answer, any_order=any_order)
        if verdict is not None:
            return verdict
        if _squeezed(attempt.answer) in _squeezed(problem.question):
            return Verdict.of(False, "symbolic", "repeats an expression of the question")
        if read_number(normalize(problem.gold)) is not None and _UNEVALUATED.search(attempt.answer):
            return Verdict.of(False, "symbolic", "an expression, where the answer is a number")
        return await grade_answer(problem.gold, attempt.answer, any_order=any_order)


def _in_any_order(problem: Problem) -> bool:
    return bool(_ANY_ORDER.search(problem.question)) and not _IN_ORDER.search(problem.question)


def _squeezed(text: str) -> str:
    return re.sub(r"[\s$]|\\left|\\right|(?<=\\)[dt](?=frac)", "", text)
