"""Which score a proof gets from many analyses of it, none of which is to be trusted alone.

The rule of DeepSeekMath-V2 (arXiv:2511.22570, section 2.3): every analysis that reports a defect is checked by m
meta-verifications, and stands when a majority of them confirms it. The lowest score that any analysis gives becomes the proof's
where at least k analyses that give it stand. Where every analysis was read and no claim of a defect stands, the proof has none: 1.
All other proofs are discarded.

Silence is no praise. An analysis that is lost or unreadable, and a claim that was not checked or whose checks decide nothing, may
hide a defect: a proof with one of these never gets 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Outcome = Literal["accepted", "unconfirmed", "unchecked", "unread"]

PERFECT = Fraction(1)


@dataclass(frozen=True)
class Analysis:
    """One verifier's analysis of a proof: its score, and the scores that m meta-verifications of it gave. None stands for what is
    lost or cannot be read.

    `Analysis(Fraction(0), (Fraction(1), Fraction(1), None))` claims a fatal defect that two of three checks confirm. An analysis
    that gives 1 claims no defect and needs no check; one that claims a defect and has no checks was never checked.
    """

    score: Fraction | None
    checks: tuple[Fraction | None, ...] = ()

    @property
    def claims(self) -> bool:
        """Whether it reports a defect."""
        return self.score is not None and self.score < PERFECT

    @property
    def stands(self) -> bool | None:
        """Whether more than half of its checks give 1: all its defects exist, and its score follows from them. None where this is
        not known: the claim was not checked, or the checks that are missing or unreadable could have decided it."""
        if not self.claims:
            return False
        confirmed = sum(check == PERFECT for check in self.checks)
        missing = sum(check is None for check in self.checks)
        if 2 * confirmed > len(self.checks):
            return True
        return False if self.checks and 2 * (confirmed + missing) <= len(self.checks) else None


@dataclass(frozen=True)
class Acceptance:
    """What a proof's analyses come to. `evidence` are the places of those analyses that give the accepted score, and stand where it
    is below 1.

    "unconfirmed": some defect stands, and too few analyses with the lowest score do. "unchecked": no defect stands, and of one that
    is claimed this is not known. "unread": no defect stands, and an analysis is lost or cannot be read.
    """

    outcome: Outcome
    score: Fraction | None = None
    evidence: tuple[int, ...] = ()


def accept(analyses: Sequence[Analysis], confirmations: int) -> Acceptance:
    """The rule above with k = `confirmations` >= 1."""
    assert confirmations >= 1, "a score that nobody confirms is no label"
    if any(analysis.stands for analysis in analyses):
        lowest = min(analysis.score for analysis in analyses if analysis.score is not None)
        standing = tuple(n for n, one in enumerate(analyses) if one.score == lowest and one.stands)
        return Acceptance("accepted", lowest, standing) if len(standing) >= confirmations else Acceptance("unconfirmed")
    if any(analysis.stands is None for analysis in analyses):
        return Acceptance("unchecked")
    if not analyses or any(analysis.score is None for analysis in analyses):
        return Acceptance("unread")
    return Acceptance("accepted", PERFECT, tuple(n for n, one in enumerate(analyses) if one.score == PERFECT))
