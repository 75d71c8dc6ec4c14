"""The rewards of the two roles that self-play trains (DeepSeekMath-V2, arXiv:2511.22570).

    verifier    R = R_format * (1 - |s' - s|) * R_meta                          (section 2.1)
    generator   R = R_format * (0.76 * R_Y + 0.24 * (1 - |s' - s|) * R_meta)    (section 2.2)

s' is the score that the reply gives, s the one that the proof was accepted with. R_Y is s, R_meta the mean score of the
meta-verifications of the reply's own evaluation. An evaluation that reports no defect claims nothing that could be made up: its
R_meta is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

CORRECTNESS, HONESTY = 0.76, 0.24


def meta_score(checks: Sequence[Fraction | None]) -> float:
    """R_meta of an evaluation with these meta-verifications: none where it claims no defect. One that can not be read is 0."""
    return float(sum(check or 0 for check in checks)) / len(checks) if checks else 1.0


def verifier_reward(well_formed: bool, given: Fraction | None, score: Fraction, meta: float) -> float:
    """`given` is None for a reply without a score."""
    return _agreement(given, score) * meta if well_formed else 0.0


def generator_reward(well_formed: bool, given: Fraction | None, score: Fraction, meta: float) -> float:
    """`given` is the score of the self-evaluation, `meta` that of its meta-verifications."""
    return CORRECTNESS * float(score) + HONESTY * _agreement(given, score) * meta if well_formed else 0.0


def _agreement(given: Fraction | None, score: Fraction) -> float:
    return 0.0 if given is None else float(1 - abs(given - score))
