"""What gives a number to an answer, or to each step of one: reward models and verifiers, as rewards and best-of-n ask them.

Both take the conversation as messages, those that the prompt showed, and text; what is behind them is not this room's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nmoe.types import Message


class Scorer(Protocol):
    """Scores whole answers: a reward model, or a verifier that reads a proof and grades it."""

    async def score(self, messages: Sequence[Message], answer: str) -> float:
        """How good the answer is; higher is better, and the scale is the scorer's own. Calls that wait at the same time may
        be answered in one pass."""


class StepScorer(Protocol):
    """Scores an answer step by step: a process reward model (Lightman et al. 2023, arXiv:2305.20050, section 2.6)."""

    async def step_scores(self, messages: Sequence[Message], steps: Sequence[str]) -> list[float]:
        """The probability that each step is right, given the steps before it: as many as there are steps."""
