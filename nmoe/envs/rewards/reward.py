"""The reward protocol: the samples that a reward receives and the ratings that it returns."""

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
    """The samples of one problem that a reward judges together, without those lost to the infrastructure.

    In formats with messages, `prompt` and `completions` are message lists of chat APIs, with reasoning under the key
    `reasoning_content`; in plain text they are strings. `answers` are the final answers alone, without reasoning.

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
    """A reward's value for one sample; None leaves the component out.

    `unavailable` says why the reward could not be computed: an infrastructure failure, which masks the sample. `cached` means
    that an earlier request's answer was used. `steps` are a verifier's step scores: for each step the index of its last token
    among the trajectory's tokens after the prompt, and its score.
    """

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
    def only_if_correct(self) -> bool: ...

    def opened(self) -> AbstractAsyncContextManager[Any]:
        """Holds resources such as connections open while the groups of a batch are rated."""

    async def rate(self, samples: Samples) -> Sequence[Rating]:
        """Returns one rating for each sample. Raises RewardError for failures other than infrastructure; it ends the run."""


class RewardError(UserError):
    """A reward raised an exception or returned an invalid value.

    The run stops and saves the sample at `index` of the group.
    """

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index


class UnavailableError(Exception):
    """A service or model that a reward needs is not reachable.

    A reward function may raise it too: its group is then masked and counted as `grader_error`, and the run continues.
    """
