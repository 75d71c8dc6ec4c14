"""The rewards of the two roles that self-play trains (DeepSeekMath-V2, arXiv:2511.22570).

    verifier    R = R_format * (1 - |s' - s|) * R_meta                          (section 2.1)
    generator   R = R_format * (0.76 * R_Y + 0.24 * (1 - |s' - s|) * R_meta)    (section 2.2)

s' is the score that the reply gives, s the one that the proof was accepted with. R_Y is s, R_meta the mean score of the
meta-verifications of the reply's own evaluation. An evaluation that reports no defect claims nothing that could be made up: its
R_meta is 1. One whose claims leave no room in the context for their check has R_meta 0: else a long evaluation would escape a low
reward. One whose checks are lost or cannot be read has no R_meta, and no reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

CORRECTNESS, HONESTY = 0.76, 0.24


def meta_score(checks: Sequence[Fraction | None]) -> float | None:
    """R_meta of an evaluation that claims a defect: the mean score of the meta-verifications that were read, or None."""
    read = [check for check in checks if check is not None]
    return float(sum(read)) / len(read) if read else None


def verifier_reward(given: Fraction, score: Fraction, meta: float) -> float:
    """The reward of a well-formed evaluation that gives the score `given`; of any other it is 0."""
    return _agreement(given, score) * meta


def generator_reward(given: Fraction, score: Fraction, meta: float) -> float:
    """The reward of a well-formed proof, whose self-evaluation gives the score `given` and has R_meta = `meta`; of any other
    reply it is 0."""
    return CORRECTNESS * float(score) + HONESTY * _agreement(given, score) * meta


def _agreement(given: Fraction, score: Fraction) -> float:
    return float(1 - abs(given - score))
