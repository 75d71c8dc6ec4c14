"""Loads all rewards of an environment, and adds their ratings to the grades of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nmoe.config.tables.rewards import (
    FunctionRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    RewardConfig,
    RewardModelRewardConfig,
    VerifierRewardConfig,
)
from nmoe.envs.rewards.function import FunctionReward
from nmoe.envs.rewards.judge import JudgeReward
from nmoe.envs.rewards.reward import LARGEST, Rating, Reward, RewardError, Samples
from nmoe.envs.rewards.scored import RewardModelReward, VerifierReward
from nmoe.envs.rewards.service import HttpReward
from nmoe.runs.waiting import all_or_none
from nmoe.types import Grade


def load_rewards(settings: Sequence[RewardConfig]) -> list[Reward]:
    """Loads the rewards of `[[rewards]]`, in order. Raises UserError for a missing function or token."""
    return [_load(one) for one in settings]


def _load(settings: RewardConfig) -> Reward:
    match settings:
        case FunctionRewardConfig():
            return FunctionReward(settings)
        case HttpRewardConfig():
            return HttpReward(settings)
        case JudgeRewardConfig():
            return JudgeReward(settings)
        case VerifierRewardConfig():
            return VerifierReward(settings)
        case RewardModelRewardConfig():
            return RewardModelReward(settings)


async def rated(rewards: Sequence[Reward], samples: Samples) -> list[Grade]:
    """Rates the samples with all rewards and returns their grades with the ratings added. Raises RewardError."""
    asked = await all_or_none([rate(reward, samples) for reward in rewards])
    grades = []
    for index, trajectory in enumerate(samples.trajectories):
        ratings = {reward.name: (reward.weight, one[index]) for reward, one in zip(rewards, asked, strict=True)}
        try:
            grades.append(with_ratings(trajectory.grade, ratings))
        except RewardError as error:
            raise RewardError(str(error), index) from None
    return grades


async def rate(reward: Reward, samples: Samples) -> Sequence[Rating]:
    """Rates each sample with one reward; with `only_if_correct`, wrong answers get 0 without being rated. Raises RewardError with
    the index of the sample among all samples.
    """
    if not reward.only_if_correct:
        return await reward.rate(samples)
    right = [index for index, one in enumerate(samples.trajectories) if is_right(one.grade)]
    if not right:
        return [Rating(0.0)] * len(samples.trajectories)
    asked = replace(
        samples,
        completions=[samples.completions[index] for index in right],
        answers=[samples.answers[index] for index in right],
        trajectories=[samples.trajectories[index] for index in right],
    )
    try:
        ratings = dict(zip(right, await reward.rate(asked), strict=True))
    except RewardError as error:
        raise RewardError(str(error), right[error.index]) from error
    return [ratings.get(index, Rating(0.0)) for index in range(len(samples.trajectories))]


def is_right(grade: Grade) -> bool:
    """Returns whether the task's verdict is that the answer is right, not only in part."""
    return grade.verdict is not None and grade.verdict.outcome == "correct"


def with_ratings(grade: Grade, ratings: Mapping[str, tuple[float, Rating]]) -> Grade:
    """Adds the ratings to the grade as further weighted components: the score is

        sum over the components c that are present: weight_c * value_c.

    Raises RewardError for a score that is not finite, or too large to be trained on. A rating of None leaves its component
    out. If no component with a weight is left, or a reward was unavailable, the sample has no valid score: it becomes a
    `grader_error`, which masks it.
    """
    components, weights = dict(grade.components), dict(grade.weights)
    for name, (weight, rating) in ratings.items():
        weights[name] = weight
        if rating.value is not None:
            components[name] = rating.value
    reason = next((rating.unavailable for _, rating in ratings.values() if rating.unavailable), "")
    if not reason and not any(weights[name] for name in components):
        reason = f"no reward has a value for it: {', '.join(ratings)} returned None"
    score = sum(weights[name] * value for name, value in components.items())
    if not abs(score) <= LARGEST:
        terms = " + ".join(
            f"{weights[name]:g} * {value:g} ({name})" for name, value in components.items() if weights[name]
        )
        raise RewardError(
            f"the score {terms} comes to {score:g}; a score is finite and at most {LARGEST:g}: lower a weight"
        )
    return replace(
        grade,
        score=score,
        components=components,
        weights=weights,
        failure="grader_error" if reason else grade.failure,
        reason=reason,
        cached=tuple(name for name, (_, rating) in ratings.items() if rating.cached),
        step_rewards=tuple(step for _, rating in ratings.values() for step in rating.steps),
    )
