"""Rewards computed by models: a reward model rates the answer; a verifier rates the answer and optionally every step.

This package loads no models: the caller attaches them before a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from nmoe.config.tables.rewards import RewardModelRewardConfig, VerifierRewardConfig
from nmoe.data.prm import split_steps
from nmoe.envs.rewards.reward import Rating, Reward, Samples, Scorer, StepScorer
from nmoe.runs.waiting import all_or_none

Decode = Callable[[Sequence[int]], str]


class VerifierReward:
    """A reward computed by a verifier, which rates the answer and, with `steps`, every step; an empty answer gets 0."""

    def __init__(self, settings: VerifierRewardConfig) -> None:
        self.name, self.weight = settings.name, settings.weight
        self.only_if_correct = settings.only_if_correct
        self._settings = settings
        self._scorer: Scorer | None = None
        self._step_scorer: StepScorer | None = None

    def attach(self, scorer: Callable[[Path], Scorer], step_scorer: Callable[[Path], StepScorer]) -> None:
        """Loads the verifier. Raises UserError if there is none, or if `steps` is set and the verifier scores only whole
        solutions."""
        path = Path(self._settings.path)
        self._scorer = scorer(path)
        if self._settings.steps:
            self._step_scorer = step_scorer(path)

    def opened(self) -> AbstractAsyncContextManager[Any]:
        return nullcontext()

    async def rate(self, samples: Samples) -> Sequence[Rating]:
        return await all_or_none([self._rate(samples, index) for index in range(len(samples.answers))])

    async def _rate(self, samples: Samples, index: int) -> Rating:
        assert self._scorer is not None, "attach_scorers comes before a run"
        answer = samples.answers[index]
        steps = split_steps(answer)
        if not steps:
            return Rating(0.0)
        value = await self._scorer.score(samples.messages, answer)
        if self._step_scorer is None:
            return Rating(value)
        scores = await self._step_scorer.step_scores(samples.messages, steps)
        trajectory = samples.trajectories[index]
        last = trajectory.turns[-1].sample.token_ids
        before = len(trajectory.token_ids) - len(last)
        ends = step_ends(samples.decode, last, answer, steps)
        return Rating(value, steps=tuple((before + end, score) for end, score in zip(ends, scores, strict=True)))


class RewardModelReward:
    """A reward computed by a reward model.

    The model's scale is arbitrary, so an empty answer cannot be given 0. It gets the lowest reward among the answers of its group,
    and no reward if the group has no answer.
    """

    def __init__(self, settings: RewardModelRewardConfig) -> None:
        self.name, self.weight = settings.name, settings.weight
        self.only_if_correct = settings.only_if_correct
        self._settings = settings
        self._scorer: Scorer | None = None

    def attach(self, reward_model: Callable[[Path], Scorer]) -> None:
        """Loads the reward model. Raises UserError if there is none."""
        self._scorer = reward_model(Path(self._settings.path))

    def opened(self) -> AbstractAsyncContextManager[Any]:
        return nullcontext()

    async def rate(self, samples: Samples) -> Sequence[Rating]:
        scorer = self._scorer
        assert scorer is not None, "attach_scorers comes before a run"
        answered = [index for index, answer in enumerate(samples.answers) if answer.strip()]
        scores = await all_or_none([scorer.score(samples.messages, samples.answers[index]) for index in answered])
        values = dict(zip(answered, scores, strict=True))
        lowest = min(scores, default=None)
        return [Rating(values.get(index, lowest)) for index in range(len(samples.answers))]


def attach_scorers(
    rewards: Sequence[Reward],
    scorer: Callable[[Path], Scorer],
    step_scorer: Callable[[Path], StepScorer],
    reward_model: Callable[[Path], Scorer],
) -> None:
    """Loads the verifiers and reward models of all rewards that use one. Raises UserError for a model that cannot be loaded."""
    for reward in rewards:
        if isinstance(reward, VerifierReward):
            reward.attach(scorer, step_scorer)
        elif isinstance(reward, RewardModelReward):
            reward.attach(reward_model)


def step_ends(decode: Decode, token_ids: Sequence[int], answer: str, steps: Sequence[str]) -> list[int]:
    """Returns for each step of an answer the index of the step's last token among the tokens `token_ids`."""
    text = decode(token_ids)
    at = max(text.rfind(answer), 0)
    ends = []
    for step in steps:
        found = text.find(step, at)
        at = len(text) if found < 0 else found + len(step)
        # Find the first token at which the decoded text includes the step's last character, which may span several tokens.
        low, high = 0, len(token_ids) - 1
        while low < high:
            middle = (low + high) // 2
            if decode(token_ids[: middle + 1])[:at] == text[:at]:
                high = middle
            else:
                low = middle + 1
        ends.append(low)
    return ends
