"""Converts trajectories for rewards: to message lists of chat APIs, or to strings in an environment of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from nmoe.envs.rewards.reward import Completion, Prompt, Samples
from nmoe.trajectory import Trajectory
from nmoe.types import Problem, TrainerState

if TYPE_CHECKING:
    from nmoe.envs.environment import Environment


def samples_of(environment: Environment, trajectories: Sequence[Trajectory], state: TrainerState) -> Samples:
    """Converts the trajectories of one problem to the samples that the environment's rewards receive."""
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
    """Returns the columns that rewards receive: the fields of the problem's record, by name.

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
