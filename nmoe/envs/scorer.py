"""Protocols of scorers: reward models and verifiers that rate an answer, or each step of one, for rewards and best-of-n.

Both take the conversation that the prompt showed, as messages, and the answer as text. Implementations are outside this room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nmoe.types import Message


class Scorer(Protocol):
    """Scores whole answers: a reward model, or a verifier that reads a proof and grades it."""

    async def score(self, messages: Sequence[Message], answer: str) -> float:
        """Rates the answer; higher is better, on the scorer's own scale. Concurrent calls may share one forward pass."""


class StepScorer(Protocol):
    """Scores each step of an answer: a process reward model (Lightman et al. 2023, arXiv:2305.20050, section 2.6)."""

    async def step_scores(self, messages: Sequence[Message], steps: Sequence[str]) -> list[float]:
        """Returns for each step the probability that it is right, given the steps before it."""
