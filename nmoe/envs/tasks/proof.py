"""Proving with self-evaluation: the answer is `## Solution` and then `## Self Evaluation`, in DeepSeekMath-V2's form
(arXiv:2511.22570, section 2.2).

No oracle knows whether the solution is right. A verdict only checks the form; self-play's verifiers rate the solution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nmoe.envs.tasks.score import CLOSING, OPENING, RUBRIC, UNKNOWN, WrittenEvaluation, read_evaluation
from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask
from nmoe.errors import UserError
from nmoe.types import Metadata, Problem, Verdict

SOLUTION, SELF_EVALUATION = "## Solution", "## Self Evaluation"
_SOLUTION = re.compile(r"^## Solution[ \t]*$", re.MULTILINE)
_SELF_EVALUATION = re.compile(r"^## Self Evaluation[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Proof:
    """The content of a generator's answer: the text of the solution, not empty, and the generator's evaluation of it."""

    solution: str
    evaluation: WrittenEvaluation


def read_proof(answer: str | None) -> Proof | None:
    """Parses the two parts of any answer; None if one is missing, empty, or without its phrases and score.

    The solution ends at the last heading of a self-evaluation, so that an evaluation within the solution is judged as part of
    it.
    """
    heading = _SOLUTION.search(answer or "")
    evaluations = list(_SELF_EVALUATION.finditer(answer or ""))
    if answer is None or heading is None or not evaluations:
        return None
    solution = answer[heading.end() : evaluations[-1].start()].strip()
    evaluation = read_evaluation(None, answer[evaluations[-1].end() :])
    return Proof(solution, evaluation) if solution and evaluation is not None else None


class ProofGenerationTask(QuestionTask):
    """Asks for a solution and an honest evaluation of it. The metadata holds the problem's text alone; the gold is always ""."""

    answer_form: AnswerForm = "final"

    def check_gold(self, problem: Problem) -> None:
        if problem.gold != UNKNOWN:
            raise UserError(f"a proof_generation problem has no gold answer, and this one has {problem.gold[:80]!r}")

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        return (
            "Solve a problem and evaluate your own solution. A right solution is rewarded, and so is an honest evaluation: a "
            "defect that you own up to costs less than one that you hide.\n\n"
            f'The answer has two parts, "{SOLUTION}" and "{SELF_EVALUATION}". The second goes from "{OPENING}" on to '
            f'"{CLOSING}" and a score:\n{RUBRIC}\n\n## Problem\n{question}',
            gold,
            {"problem": question},
        )

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        right = f"{SOLUTION}\nIt is plain.\n\n{SELF_EVALUATION}\n{OPENING}\nNothing is shown.\n{CLOSING} 0"
        return right, right.replace(SELF_EVALUATION, "## Evaluation")

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        proof = read_proof(attempt.answer)
        if proof is None:
            return Verdict.of(False, "form", "no solution with a self-evaluation")
        return Verdict.of(True, "form", f"a solution that evaluates itself with {float(proof.evaluation.score):g}")
