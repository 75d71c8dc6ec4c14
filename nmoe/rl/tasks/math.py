"""Competition mathematics with a short answer in LaTeX (Hendrycks et al. 2021, arXiv:2103.03874)."""

from __future__ import annotations

from nmoe.errors import UserError
from nmoe.rl.grading import exact
from nmoe.rl.grading.verdict import Verdict
from nmoe.rl.problem import Problem
from nmoe.rl.tasks.task import Attempt, QuestionTask


class MathTask(QuestionTask):
    """Exact match after normalisation: a right answer in another form than the gold's can count as wrong, but a wrong
    one never as right."""

    bare_final = False

    def check_gold(self, problem: Problem) -> None:
        if len(problem.gold) > exact.MAX_ANSWER_CHARS:
            raise UserError(
                f"the gold answer has {len(problem.gold)} characters, more than {exact.MAX_ANSWER_CHARS}: "
                "is it a whole solution? choose a gold_extractor"
            )
        if not exact.normalize(problem.gold):
            raise UserError(f"nothing is left of the gold answer {problem.gold!r} without its typesetting")

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, f"({problem.gold}) + 1"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        return Verdict.of(exact.equal(problem.gold, attempt.answer), "exact", "equal after normalisation or not")
