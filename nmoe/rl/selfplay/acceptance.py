"""Which score a proof gets from many analyses of it, none of which is to be trusted alone.

The rule of DeepSeekMath-V2 (arXiv:2511.22570, section 2.3): every analysis that reports a defect is checked by m
meta-verifications, and stands when a majority of them confirms it. The lowest score that any analysis gives becomes the proof's
where at least k analyses that give it stand. Where no analysis with a defect stands, the proof has none: 1. All other proofs are
discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Outcome = Literal["accepted", "unconfirmed", "unread"]

PERFECT = Fraction(1)


@dataclass(frozen=True)
class Analysis:
    """One verifier's analysis of a proof: its score, and what m meta-verifications of it gave. None is one that can not be read.

    `Analysis(Fraction(0), (Fraction(1), Fraction(1), None))` claims a fatal defect that two of three checks confirm. An analysis
    that gives 1 claims no defect: nothing of it is checked.
    """

    score: Fraction | None
    checks: tuple[Fraction | None, ...] = ()

    @property
    def claims(self) -> bool:
        """Whether it reports a defect."""
        return self.score is not None and self.score < PERFECT

    @property
    def stands(self) -> bool:
        """Whether more than half of its checks find that all its defects exist and its score follows from them: that they give 1. A
        check that can not be read confirms nothing, and counts."""
        return self.claims and 2 * sum(check == PERFECT for check in self.checks) > len(self.checks)


@dataclass(frozen=True)
class Acceptance:
    """What a proof's analyses come to. `evidence` are the places of those analyses that give the accepted score, and stand where it
    is below 1.

    "unconfirmed": some defect stands, and too few analyses with the lowest score do. "unread": no analysis can be read, so that
    nobody has looked at the proof; silence is no praise.
    """

    outcome: Outcome
    score: Fraction | None = None
    evidence: tuple[int, ...] = ()


def accept(analyses: Sequence[Analysis], confirmations: int) -> Acceptance:
    """The rule above with k = `confirmations` >= 1."""
    assert confirmations >= 1, "a score that nobody confirms is no label"
    scores = [analysis.score for analysis in analyses if analysis.score is not None]
    if not scores:
        return Acceptance("unread")
    if not any(analysis.stands for analysis in analyses):
        return Acceptance("accepted", PERFECT, tuple(n for n, one in enumerate(analyses) if one.score == PERFECT))
    lowest = min(scores)
    standing = tuple(n for n, one in enumerate(analyses) if one.score == lowest and one.stands)
    return Acceptance("accepted", lowest, standing) if len(standing) >= confirmations else Acceptance("unconfirmed")
