r"""Tasks of proving and judging: proofs with self-evaluation, verifications of proofs, and labels and scores of solutions by steps.

A judge gives a score of 0, 0.5 or 1. The reward is 1 - |s' - s| for the given score s' and the gold s (DeepSeekMath-V2,
arXiv:2511.22570); only an equal score is correct. The final message is the score alone. A message that includes the evaluation is
accepted too: the score follows "Based on my evaluation, the final overall score should be:" (the published prompt has "overal"),
bare or in a `\boxed{}`. In self-play the gold is unknown when a score is sampled: it is "" then, and the verdict only repeats the
score.

A proof has two parts, `## Solution` and then `## Self Evaluation` (section 2.2). No oracle knows whether the solution is right. A
verdict only checks the form; self-play's verifiers rate the solution.

Process supervision: a record has the problem, a field `steps` with a list of texts, and the gold in its answer field. `prm_step`
asks for the label of the last step, so that a record is a prefix through step k. `prm_solution` asks for the score of all steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from nmoe.data.records import STEP_LABELS
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
    """Reads the score in an answer: 0, 1/2 or 1; None for any other answer."""
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
    """Finds the evaluation of a proof in any completion; None if a phrase or the score is missing.

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
    """The base of tasks that ask for a score of 0, 0.5 or 1; the reward is 1 minus the distance from the gold score."""

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


SOLUTION, SELF_EVALUATION = "## Solution", "## Self Evaluation"
_SOLUTION = re.compile(r"^## Solution[ \t]*$", re.MULTILINE)
_SELF_EVALUATION = re.compile(r"^## Self Evaluation[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Proof:
    """The content of a generator's answer: the text of its solution, not empty, and its evaluation of that solution."""

    solution: str
    evaluation: WrittenEvaluation


def read_proof(answer: str | None) -> Proof | None:
    """Parses a generator's answer, its solution and self-evaluation; None if a part is missing, empty, or without its phrases and
    score.

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
    """Asks for a solution and for an honest evaluation of this solution. The metadata holds the problem's text without
    instructions; the gold is always "".
    """

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


_LABEL_OF = {spelling: label for label, spellings in STEP_LABELS.items() for spelling in spellings}


def read_label(text: str) -> str | None:
    """Returns the label "+", "0" or "-" if the text is one of its spellings; None otherwise."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    stripped = text.strip().strip("*$").strip()
    # Normalisation drops a plus before a number; here it would turn "+-" into "-".
    return _LABEL_OF.get(stripped if stripped.startswith("+") else normalize(stripped).casefold())


class PrmStepTask(QuestionTask):
    """Labels the last step of a solution: "+", "0" or "-"."""

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
    """Scores a solution by its steps: 0, 0.5 or 1."""

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
