r"""Judging a solution with a score of 0, 0.5 or 1: proofs, evaluations of proofs, and solutions by steps.

The reward is 1 - |s' - s| for the given score s' and the gold s (DeepSeekMath-V2, arXiv:2511.22570); only an equal score is
correct. The final message is the score alone. A message that includes the evaluation is accepted too: the score follows
"Based on my evaluation, the final overall score should be:" (the published prompt has "overal"), bare or in a `\boxed{}`.

In self-play the gold is unknown when a score is sampled. It is "" then, and the verdict says only what was read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask
from nmoe.errors import UserError
from nmoe.grading.extraction import last_boxed
from nmoe.grading.math.normalization import MAX_ANSWER_CHARS, normalize
from nmoe.grading.math.numbers import read_number
from nmoe.types import Metadata, Problem, Verdict

# The gold of a problem whose right score is unknown.
UNKNOWN = ""
SCORES = (Fraction(0), Fraction(1, 2), Fraction(1))
OPENING = "Here is my evaluation of the solution:"
CLOSING = "Based on my evaluation, the final overall score should be:"
_CLOSING = re.compile(r"Based on my evaluation, the final overall? score should be:", re.IGNORECASE)

RUBRIC = """- 1: the solution is complete and correct, every step of it is justified
- 0.5: its logic is right overall, with minor errors or details left out
- 0: it does not solve the problem, or has a fatal error or a gap that matters"""


def read_score(answer: str) -> Fraction | None:
    """Returns the score that an answer gives; None if it gives none of the three."""
    phrases = list(_CLOSING.finditer(answer))
    text = answer[phrases[-1].end() :] if phrases else answer
    if len(text.strip()) > MAX_ANSWER_CHARS:
        return None
    box = last_boxed(text)
    number = read_number(normalize(text if box is None else box.content))
    return number.value if number is not None and number.value in SCORES else None


@dataclass(frozen=True)
class WrittenEvaluation:
    r"""The text of an evaluation, from its opening phrase to its score, and that score.

    WrittenEvaluation("Here is my evaluation of the solution:\nStep 2 is wrong: 12+2=14\n"
                      "Based on my evaluation, the final overall score should be: 0", Fraction(0))
    """

    text: str
    score: Fraction


def read_evaluation(reasoning: str | None, answer: str | None) -> WrittenEvaluation | None:
    """Finds the evaluation in any completion; None if a phrase or the score is missing.

    It is in the answer if the answer has the phrases, else in the reasoning; the score is the answer's.
    """
    score = None if answer is None else read_score(answer)
    if score is None:
        return None
    for text in (answer, reasoning):
        closings = list(_CLOSING.finditer(text or ""))
        opening = -1 if text is None or not closings else text.rfind(OPENING, 0, closings[-1].start())
        if text is not None and opening >= 0:
            written = text[opening : closings[-1].start()].strip()
            return WrittenEvaluation(f"{written}\n{CLOSING} {float(score):g}", score)
    return None


class ScoreTask(QuestionTask):
    """The base of scoring tasks: a prompt made of the record's parts, and the reward."""

    answer_form: AnswerForm = "final"
    gold_types = (str, int, float)

    def check_gold(self, problem: Problem) -> None:
        if read_score(problem.gold) is None:
            raise UserError(
                f"the gold score of a {problem.task_type} problem is 0, 0.5 or 1, not {problem.gold[:80]!r}"
            )

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        gold = read_score(problem.gold)
        return problem.gold, "0" if gold != 0 else "1"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        given = read_score(attempt.answer)
        if given is None:
            return Verdict.of(False, "score", "no score of 0, 0.5 or 1")
        if problem.gold == UNKNOWN:
            return Verdict.of(False, "unlabelled", f"{float(given):g}, and nobody knows the score")
        gold = read_score(problem.gold)
        assert gold is not None, "check_gold refuses a gold that is no score"
        outcome = Verdict.of(given == gold, "score", "").outcome
        return Verdict(outcome, float(1 - abs(given - gold)), "score", f"{float(given):g} for {float(gold):g}")


class ProofVerificationTask(ScoreTask):
    """Scores a proof by the rubric. The proof is in the record's field `proof` or `solution`."""

    record_fields = ("proof", "solution")

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        proof = _one_of(record, self.record_fields)
        return (
            f"Evaluate the solution to a problem and give it a score:\n{RUBRIC}\n\n"
            f'Go through it step by step, from "{OPENING}" on to "{CLOSING}". The answer is the score alone.\n\n'
            f"## Problem\n{question}\n\n## Solution\n{proof}",
            gold,
            {},
        )


class MetaVerificationTask(ScoreTask):
    """Scores an evaluation of a proof: do the claimed defects exist, and does the score follow from them?

    The record's fields are `proof` or `solution`, and `evaluation` or `analysis`.
    """

    record_fields = ("proof", "solution", "evaluation", "analysis")

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        proof, evaluation = _one_of(record, self.record_fields[:2]), _one_of(record, self.record_fields[2:])
        return (
            "Judge an evaluation of a solution. Look only at the defects that it claims, not for others, and give a score:\n"
            "- 1: all defects that it claims exist, and its score follows from them by the rubric below\n"
            "- 0.5: some of them exist, or all do and its wording or score has an error\n"
            "- 0: none of them exists\n\n"
            f"The rubric of the evaluation:\n{RUBRIC}\n\nThe answer is your score alone.\n\n"
            f"## Problem\n{question}\n\n## Solution\n{proof}\n\n## Evaluation\n{evaluation}",
            gold,
            {},
        )


def _one_of(record: Mapping[str, Any], fields: tuple[str, ...]) -> str:
    for field in fields:
        value = record.get(field)
        if isinstance(value, str) and value.strip():
            return value
    raise UserError(f"none of the fields {', '.join(map(repr, fields))} holds a text; the task needs one of them")
