"""A verdict: what a task's verifier says of one attempt, and which layer of it said so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["correct", "incorrect", "error"]


@dataclass(frozen=True)
class Verdict:
    """Worked example, a right answer in another form than the gold's: `Verdict("correct", 1.0, "numeric", "0.5 = 1/2")`.

    `error` is for a verifier that could not do its work because of something else than the answer, such as a worker that the
    system killed: the sample is masked and counted as `grader_error`, and its score of 0 is no reward. What the answer
    itself brings about, a deadline included, is `incorrect`; a defect of the verifier raises, which stops the run.
    """

    outcome: Outcome
    score: float  # 1 correct, 0 incorrect, between the two for graded scores, 0 for an error
    layer: str  # what settled it: "exact", "numeric", "symbolic", "choice", "tests", ...
    reason: str  # for people, short

    @classmethod
    def of(cls, correct: bool, layer: str, reason: str) -> Verdict:
        """Right or wrong, nothing between."""
        return cls("correct" if correct else "incorrect", float(correct), layer, reason)
