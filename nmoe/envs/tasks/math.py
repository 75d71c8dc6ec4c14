"""Competition mathematics with a short answer in LaTeX (Hendrycks et al. 2021, arXiv:2103.03874)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask, group_metadata
from nmoe.errors import InfrastructureError, UserError
from nmoe.grading.extraction import unreadable
from nmoe.grading.math.answers import grade_answer
from nmoe.grading.math.normalization import MAX_ANSWER_CHARS
from nmoe.grading.math.question import POLICY_KEYS, Policy
from nmoe.types import Metadata, Problem, Verdict

_IN_ORDER = re.compile(
    r"\border(?:ed)? (?:from|of)|respectively|(?:in|de)creasing|(?:a|de)scending|smallest|largest", re.IGNORECASE
)


class MathTask(QuestionTask):
    r"""Compares answers with the gold for mathematical equivalence (docs/guides/grading.md), under rules that depend on the
    question.

    An expression from the question itself is not an answer: `\sqrt{180}` equals the gold `6\sqrt{5}`, but "Simplify
    $\sqrt{180}$" asks for more. Nor is one whose constants are still to be worked out: a policy that learns that `96/4` or
    `\binom{8}{4}+0` is rewarded would never compute it. Both rules hold for every part of an answer.
    The pool's `answer_order` and `units` apply; "smallest first", "respectively" and similar words in a question make the
    order count regardless.
    """

    answer_form: AnswerForm = "boxed"
    record_fields = ("level", "subject", "type")
    gold_types = (str, int, float)

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        """Returns question, gold, and as metadata the record's level and subject, by which evaluations and metrics are grouped."""
        return question, gold, group_metadata(record)

    def check_gold(self, problem: Problem) -> None:
        if (fault := unreadable(problem.gold)) is not None:
            raise UserError(f"{fault}; choose a gold_extractor")

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, f"({problem.gold}) + 1"

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        if one.strip() == other.strip():
            return True
        if max(len(one), len(other)) > MAX_ANSWER_CHARS:
            return False
        # An answer may omit what the gold says, so either of the two may be the fuller one.
        for gold, answer in ((one, other), (other, one)):
            verdict = await grade_answer(gold, answer, _policy(problem))
            if verdict.outcome == "error":
                raise InfrastructureError(f"two answers to {problem.id} could not be compared: {verdict.reason}")
            if verdict.outcome == "correct":
                return True
        return False

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        policy = replace(_policy(problem), question=problem.question)
        return await grade_answer(problem.gold, attempt.answer, policy)


def _policy(problem: Problem) -> Policy:
    """Returns the rules of comparison from the pool's settings; the order of parts counts if the question asks for one, as in
    "smallest first".
    """
    settings = {key: problem.metadata[key] for key in POLICY_KEYS if key in problem.metadata}
    policy = Policy(**settings)  # type: ignore[arg-type]
    return replace(policy, answer_order="as_gold") if _IN_ORDER.search(problem.question) else policy
