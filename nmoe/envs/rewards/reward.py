"""The protocols of rewards and scorers, the samples that a reward receives, and the ratings that it returns.

A scorer is a reward model or a verifier that rates an answer, or each step of one, for rewards and best-of-n. It takes the
conversation that the prompt showed, as messages, and the answer as text. Implementations of scorers are outside this package.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from nmoe.errors import UserError, shown
from nmoe.trajectory import Trajectory
from nmoe.types import Message, Problem, TrainerState


class Scorer(Protocol):
    """Protocol of a model that scores whole answers: a reward model, or a verifier that reads a proof and grades it."""

    async def score(self, messages: Sequence[Message], answer: str) -> float:
        """Returns the score of an answer; higher is better, on the scorer's own scale. Concurrent calls may share one forward
        pass.
        """


class StepScorer(Protocol):
    """Protocol of a model that scores each step of an answer: a process reward model (Lightman et al. 2023, arXiv:2305.20050,
    section 2.6).
    """

    async def step_scores(self, messages: Sequence[Message], steps: Sequence[str]) -> list[float]:
        """Returns for each step the probability that it is right, given the steps before it."""


Prompt = str | list[dict[str, Any]]
Completion = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Samples:
    """The samples of one problem that a reward rates together; samples lost to infrastructure failures are left out.

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
    """A reward's value for one sample; with None the sample's score is computed without this reward.

    `unavailable` says why the reward could not be computed: an infrastructure failure, which masks the sample. `cached` means
    that an earlier request's answer was used. `steps` are a verifier's step scores: for each step the index of its last token
    among the trajectory's tokens after the prompt, and its score.
    """

    value: float | None
    unavailable: str = ""
    cached: bool = False
    steps: tuple[tuple[int, float], ...] = ()


class Reward(Protocol):
    """The protocol of a reward: an object that rates the samples of one problem."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def only_if_correct(self) -> bool: ...

    def opened(self) -> AbstractAsyncContextManager[Any]:
        """Returns a context manager that keeps resources such as connections open while the groups of a batch are rated."""

    async def rate(self, samples: Samples) -> Sequence[Rating]:
        """Returns one rating for each sample; an infrastructure failure is a rating with `unavailable`. Raises RewardError for any
        other failure, which ends the run.
        """


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


_shown = partial(shown, characters=200)
# Advantages are computed in single precision, which can represent the square of this.
LARGEST = 1e18


def checked_values(who: str, returned: Any, count: int) -> list[float | None]:
    """Converts the values that a reward returned for `count` completions to floats, and to None for a component that is left out.

    `returned` may be a list or another iterable of numbers, one-element tensors and None. Raises RewardError, which names the
    reward (`who`) and the value.
    """
    try:
        values = None if isinstance(returned, str | bytes | dict) else list(returned)
    except TypeError:
        values = None
    if values is None:
        raise RewardError(
            f"{who} returned {_shown(returned)}, a {type(returned).__name__}, for {count} completions; it has to return a list "
            "with a number or None for each"
        )
    if len(values) != count:
        raise RewardError(
            f"{who} returned {len(values)} values for {count} completions, {_shown(values)}; it has to return one for each"
        )
    return [_checked(who, value, index, count) for index, value in enumerate(values)]


def _checked(who: str, value: Any, index: int, count: int) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        with suppress(ValueError, RuntimeError, TypeError):
            value = value.item()  # a tensor or an array of one number
    where = f"as value {index + 1} of {count}"
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"{who} returned {_shown(value)}, a {type(value).__name__}, {where}; a reward is a number, or None to leave it out",
            index,
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise RewardError(
            f"{who} returned {_shown(value)} {where}; a reward is finite and at most {LARGEST:g}, or None to leave it out of this "
            "sample's score",
            index,
        )
    return number
