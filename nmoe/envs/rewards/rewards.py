"""All rewards of an environment: loads them, gives them trajectories as chat messages or text, and adds their ratings to the
grades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from nmoe.config.tables.rewards import (
    FunctionRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    RewardConfig,
    RewardModelRewardConfig,
    VerifierRewardConfig,
)
from nmoe.envs.gather import all_or_none
from nmoe.envs.rewards.function import FunctionReward
from nmoe.envs.rewards.judge import JudgeReward
from nmoe.envs.rewards.reward import LARGEST, Completion, Prompt, Rating, Reward, RewardError, Samples
from nmoe.envs.rewards.scored import RewardModelReward, VerifierReward
from nmoe.envs.rewards.service import HttpReward
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Problem, TrainerState

if TYPE_CHECKING:
    from nmoe.envs.environment import Environment


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
    """Returns the samples' grades with the ratings of all rewards. Raises RewardError."""
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
    """Has one reward rate each sample; with `only_if_correct`, wrong answers get 0. Raises
    RewardError with the index of the sample among all."""
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
    """Whether the task's verdict is that the answer is right, not only in part."""
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


def samples_of(environment: Environment, trajectories: Sequence[Trajectory], state: TrainerState) -> Samples:
    """Builds what the environment's rewards receive, from the trajectories of one problem."""
    problem = trajectories[0].problem
    messages = environment.prompts.messages(problem)
    prompt: Prompt = [{"role": message.role, "content": message.content} for message in messages]
    if environment.settings.format == "boxed":
        prompt = "\n\n".join(message.content for message in messages) + "\n"
    return Samples(
        problem=problem,
        messages=messages,
        prompt=prompt,
        completions=[completion_of(environment, trajectory) for trajectory in trajectories],
        answers=[environment.renderer.said(trajectory.turns[-1].said_ids)[1] for trajectory in trajectories],
        trajectories=trajectories,
        columns=columns_of(problem),
        state=state,
        decode=environment.tokenizer.decode,
    )


def columns_of(problem: Problem) -> dict[str, Any]:
    """Returns the problem's columns: the fields of its record by their own names.

    `gold` and the task's metadata, such as a generated problem's `difficulty`, are added where no field has that name.
    """
    return {**problem.metadata, "gold": problem.gold, **problem.columns}


def completion_of(environment: Environment, trajectory: Trajectory) -> Completion:
    """Converts a trajectory for rewards: to a string in plain text, otherwise to the messages of all turns, tools and users.

    [{"role": "assistant", "content": "",
      "tool_calls": [{"type": "function", "function": {"name": "python", "arguments": "{...}"}}]},
     {"role": "tool", "name": "python", "content": "42"},
     {"role": "assistant", "content": "The answer is 42.", "reasoning_content": "6 * 7 is 42."}]
    """
    form = environment.renderer
    users = {exchange.turn: exchange.user for exchange in trajectory.exchanges if exchange.user is not None}
    if environment.settings.format == "boxed":
        texts = [form.said(turn.said_ids)[1] for turn in trajectory.turns]
        return "\n".join(text for pair in zip_longest(texts, users.values()) for text in pair if text is not None)
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(trajectory.turns):
        reasoning, content = form.said(turn.said_ids)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls := form.calls(index, turn.sample.token_ids):
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        messages.append(message)
        messages += [
            {"role": "tool", "name": event.call.name, "content": event.output}
            for event in trajectory.tool_events
            if event.call.call_id.startswith(f"{index}/")
        ]
        if index in users:
            messages.append({"role": "user", "content": users[index]})
    return messages
