"""A reward: what it is given of a group of samples, and what it says of each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from nmoe.errors import UserError
from nmoe.trajectory import Trajectory
from nmoe.types import Message, Problem, TrainerState

Prompt = str | list[dict[str, Any]]
Completion = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Samples:
    """The samples of one problem that a reward judges together, those that the infrastructure lost left out.

    In the formats with messages `prompt` and `completions` are message lists as chat APIs write them, in plain text strings;
    reasoning is under the key `reasoning_content`. `answers` are the completions' last words alone, without reasoning.

        Samples(problem=Problem("sort/0", ...), messages=[Message("user", "Sort: 312")],
                prompt=[{"role": "user", "content": "Sort: 312"}],
                completions=[[{"role": "assistant", "content": "123", "reasoning_content": "The answer follows."}]],
                answers=["123"], trajectories=[...], columns={"gold": "123", "difficulty": 3}, state=TrainerState(7, 100))
    """

    problem: Problem
    messages: Sequence[Message]
    prompt: Prompt
    completions: Sequence[Completion]
    answers: Sequence[str]
    trajectories: Sequence[Trajectory]
    columns: Mapping[str, Any]
    state: TrainerState
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Rating:
    """What a reward says of one sample: a number, or None where it has nothing to say, which leaves its component out.
    `unavailable` is why it could not be asked: the infrastructure's failure, which masks the sample. `cached`: the answer to an
    earlier request was used. `steps` are what a verifier says of the steps: of each the place of its last token among the
    trajectory's tokens after the prompt, and its score."""

    value: float | None
    unavailable: str = ""
    cached: bool = False
    steps: tuple[tuple[int, float], ...] = ()


class Reward(Protocol):
    """One of `[[rewards]]`."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def replayable(self) -> bool:
        """Whether a replay may ask again, with one sample alone, and has to get the same value."""

    def opened(self) -> AbstractAsyncContextManager[Any]:
        """What is open, such as connections, while the groups of a batch are rated."""

    async def rate(self, samples: Samples) -> Sequence[Rating]:
        """One rating for each sample. Raises RewardError for what is no matter of the infrastructure: it ends the run."""


class RewardError(UserError):
    """A reward raised, or returned what is no reward: the run stops with the sample at place `index` of the group saved."""

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index


class UnavailableError(Exception):
    """What a reward asks cannot be reached. A reward function may raise it, too: its group is masked and counted as
    `grader_error`, and the run goes on."""
