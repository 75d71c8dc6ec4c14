"""The rules of DeepSeekMath-V2 (arXiv:2511.22570) for accepting a score of a proof, and for the rewards that follow from the score.

Acceptance (section 2.3). No single analysis is trusted. Every analysis that reports a defect is checked by m meta-verifications,
and is confirmed when a majority of them agrees. A proof gets the lowest score that any analysis gives, where at least k analyses
with that score are confirmed. It gets 1 where the confirmed claims of a defect are fewer than half of k. All other proofs are
discarded. A missing analysis may hide a defect: one that is lost or unreadable, and a claim whose checks are missing or decide
nothing, counts as a confirmed claim where a proof could get 1.

Rewards (sections 2.1 and 2.2). s' is the score that a completion gives, s the score that the proof was accepted with:

    verifier    R = R_format * (1 - |s' - s|) * R_meta
    generator   R = R_format * (0.76 * R_Y + 0.24 * (1 - |s' - s|) * R_meta)

R_Y is s. R_meta is the mean score of the meta-verifications of the completion's own evaluation. It is 1 for an evaluation that
reports no defect, since there is nothing it could have made up, and 0 for one whose claims leave no room in the context for their
check, so that long evaluations do not escape a low reward. If all checks are lost or unreadable there is no R_meta and no reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Outcome = Literal["accepted", "unconfirmed", "unchecked", "unread"]

PERFECT = Fraction(1)
CORRECTNESS, HONESTY = 0.76, 0.24


@dataclass(frozen=True)
class Analysis:
    """One verifier's analysis of a proof: its score, and the scores that m meta-verifications (`checks`) gave the analysis. None is
    a score that is lost or unreadable.

    `Analysis(Fraction(0), (Fraction(1), Fraction(1), None))` claims a fatal defect that two of three checks confirm. An analysis
    that gives 1 claims no defect and needs no check; one that claims a defect and has no checks was never checked.
    """

    score: Fraction | None
    checks: tuple[Fraction | None, ...] = ()

    @property
    def claims(self) -> bool:
        """Whether the analysis claims a defect: it gives a score below 1."""
        return self.score is not None and self.score < PERFECT

    @property
    def stands(self) -> bool | None:
        """Whether more than half of the checks confirm the analysis with a score of 1. False if no defect is claimed; None if the
        claim was not checked, or if missing and unreadable checks could decide.
        """
        if not self.claims:
            return False
        confirmed = sum(check == PERFECT for check in self.checks)
        missing = sum(check is None for check in self.checks)
        if 2 * confirmed > len(self.checks):
            return True
        return False if self.checks and 2 * (confirmed + missing) <= len(self.checks) else None


@dataclass(frozen=True)
class Acceptance:
    """The decision on a proof. `evidence` holds the indices of the analyses that give the accepted score, if it is below 1 only the
    confirmed ones.

    "unconfirmed": some defect is confirmed, but too few analyses with the lowest score are. "unchecked": no defect is confirmed,
    and for one that is claimed the checks do not decide. "unread": no defect is confirmed, and an analysis is lost or unreadable.
    """

    outcome: Outcome
    score: Fraction | None = None
    evidence: tuple[int, ...] = ()


def accept(analyses: Sequence[Analysis], confirmations: int) -> Acceptance:
    """Decides with which score a proof is accepted, by the rule above with k = `confirmations` >= 1."""
    assert confirmations >= 1, "an unconfirmed score is no label"
    confirmed = sum(analysis.stands is True for analysis in analyses)
    unchecked = sum(analysis.stands is None for analysis in analyses)
    unread = sum(analysis.score is None for analysis in analyses)
    if confirmed:
        lowest = min(analysis.score for analysis in analyses if analysis.score is not None)
        standing = tuple(n for n, one in enumerate(analyses) if one.score == lowest and one.stands)
        if len(standing) >= confirmations:
            return Acceptance("accepted", lowest, standing)
    if analyses and 2 * (confirmed + unchecked + unread) < confirmations:
        return Acceptance("accepted", PERFECT, tuple(n for n, one in enumerate(analyses) if one.score == PERFECT))
    if confirmed:
        return Acceptance("unconfirmed")
    return Acceptance("unchecked" if unchecked else "unread")


def is_true(analysis: Analysis, score: Fraction | None, repeated: bool) -> bool | None:
    """Returns whether the claim of an analysis is true, as far as the score that its proof was accepted with settles it; None if
    that is unknown, as for a proof that was not accepted.

    No claim about a proof with 1 is true, even if its checks confirm it. A claim about another proof is false if its checks refute
    it. It is true if it stands, gives the proof's score, and is `repeated`: no other claim with this score is made more often.
    """
    if score is None:
        return None
    if score == PERFECT or analysis.stands is False:
        return False
    return True if analysis.stands and analysis.score == score and repeated else None


def meta_score(checks: Sequence[Fraction | None]) -> float | None:
    """Returns R_meta of an evaluation that claims a defect: the mean score of its readable meta-verifications; None if there are
    none.
    """
    read = [check for check in checks if check is not None]
    return float(sum(read)) / len(read) if read else None


def verifier_reward(given: Fraction, score: Fraction, meta: float) -> float:
    """Returns the reward of a well-formed evaluation that gives the score `given` to a proof accepted with `score`; a malformed one
    gets 0.
    """
    return _agreement(given, score) * meta


def generator_reward(given: Fraction, score: Fraction, meta: float) -> float:
    """Returns the reward of a well-formed proof that was accepted with `score`; its self-evaluation gives `given` and has R_meta =
    `meta`. Any other completion gets 0.
    """
    return CORRECTNESS * float(score) + HONESTY * _agreement(given, score) * meta


def _agreement(given: Fraction, score: Fraction) -> float:
    return float(1 - abs(given - score))
