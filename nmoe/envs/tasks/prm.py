"""Process supervision: labels of single steps, and scores of whole solutions by their steps.

A record has the problem, a field `steps` with a list of texts, and the gold in its answer field. `prm_step` asks for the label
of the last step, so that a record is a prefix through step k. `prm_solution` asks for the score of all steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nmoe.data.records import STEP_LABELS
from nmoe.envs.tasks.score import ScoreTask
from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask
from nmoe.errors import UserError
from nmoe.grading.math.normalization import MAX_ANSWER_CHARS, normalize
from nmoe.types import Metadata, Problem, Verdict

_LABEL_OF = {spelling: label for label, spellings in STEP_LABELS.items() for spelling in spellings}


def read_label(text: str) -> str | None:
    """Returns the label "+", "0" or "-" if the text consists of it; None otherwise."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    stripped = text.strip().strip("*$").strip()
    # Normalisation drops a plus before a number; here it would turn "+-" into "-".
    return _LABEL_OF.get(stripped if stripped.startswith("+") else normalize(stripped).casefold())


class PrmStepTask(QuestionTask):
    answer_form: AnswerForm = "final"
    record_fields = ("steps",)
    gold_types = (str, int, bool)

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        steps = _steps(record)
        asked = (
            "Label the last step of a solution, given the steps before it:\n"
            "+  it is correct and leads on\n0  it is neither wrong nor a step forward\n-  it is wrong\n\n"
            "The answer is the label alone."
        )
        return f"{asked}\n\n{_shown(question, steps)}", read_label(gold) or gold, {"step": len(steps)}

    def check_gold(self, problem: Problem) -> None:
        if problem.gold not in STEP_LABELS:
            raise UserError(f"the gold label of a step is one of {', '.join(_LABEL_OF)}, not {problem.gold[:80]!r}")

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, "-" if problem.gold != "-" else "+"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        label = read_label(attempt.answer)
        if label is None:
            return Verdict.of(False, "label", "no label")
        return Verdict.of(label == problem.gold, "label", f"labelled {label}")


class PrmSolutionTask(ScoreTask):
    record_fields = ("steps",)

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        steps = _steps(record)
        asked = (
            "Score a solution by its steps:\n- 1: every step is correct, and they solve the problem\n"
            "- 0.5: no step is wrong, and they do not solve it\n- 0: a step is wrong\n\nThe answer is the score alone."
        )
        return f"{asked}\n\n{_shown(question, steps)}", gold, {"step": len(steps)}


def _steps(record: Mapping[str, Any]) -> list[str]:
    steps = record.get("steps")
    if not isinstance(steps, list | tuple) or not steps or not all(isinstance(step, str) and step for step in steps):
        raise UserError("field 'steps' is a list of at least one text, the steps of the solution in their order")
    return list(steps)


def _shown(question: str, steps: list[str]) -> str:
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, start=1))
    return f"## Problem\n{question}\n\n## Steps\n{numbered}"
