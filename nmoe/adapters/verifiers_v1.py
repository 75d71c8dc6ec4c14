"""Environments of nmoe as tasksets of verifiers from 0.4 on, with tools and turns of the user. In a module of your own:

    # my_sums.py
    from nmoe.adapters.verifiers_v1 import NmoeEnv, NmoeTaskset

    __all__ = ["NmoeEnv", "NmoeTaskset"]

and `vf-eval my-sums --env.taskset.environment word_problems --env.player.harness.id null --select.limit 20`. Tested with verifiers
0.4.0.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf

from nmoe.adapters.environment import shared_by_name
from nmoe.adapters.messages import as_users
from nmoe.errors import UserError
from nmoe.types import Grade


class NmoeConfig(vf.TasksetConfig):
    """What `--env.taskset` takes."""

    environment: str = ""
    """a TOML file, a directory with environment.toml, or a packaged name"""
    split: Literal["train", "validation", "eval"] = "train"
    """problems to train on, or held-out ones"""
    stage: str | None = None
    """the stage of the curriculum whose weights count; default: the last"""
    opens_reasoning: bool | None = None
    """whether the model's chat template ends prompts in an opened think tag"""


class NmoeData(vf.TaskData):
    environment: str
    stage: str | None
    opens_reasoning: bool | None
    label: str


class NmoeTask(vf.Task[NmoeData, vf.State, vf.TaskConfig]):
    """A problem, which `NmoeEnv` plays and grades."""


class NmoeEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class NmoeEnv(vf.Env[NmoeEnvConfig]):
    """Plays an episode with one player. Tools are declared in the system prompt, and answer as the user. A grader that raises fails
    the episode."""

    async def run(self, task: Any, agents: Any) -> None:
        # A worker loads it with its first episode, for minutes where gold answers are graded in sandboxes.
        shared = await asyncio.to_thread(shared_by_name, task.data.environment, task.data.stage)
        episode = shared.episode(task.data.label, opens_reasoning=task.data.opens_reasoning)
        try:
            await episode.abegin()
            async with agents.player.interaction(task) as interaction:
                grade = await _played(episode, interaction)
            if grade is not None:
                interaction.trace.record_reward(shared.name, grade.score, 1.0)
                interaction.trace.record_metrics({name: grade.components.get(name, 0.0) for name in shared.components})
        finally:
            await episode.aclose()


async def _played(episode: Any, interaction: Any) -> Grade | None:
    """Returns the grade; None if the model failed, which the trace says."""
    segment = await interaction.turn()
    while not segment.terminated:
        said = [one for one in segment.messages if one.role == "assistant"][-1].model_dump()
        step = await episode.astep(said, "length" if interaction.trace.is_truncated else "stop")
        if step.grade is not None:
            return step.grade
        segment = await interaction.turn(as_users(step.messages))
    if interaction.trace.has_error:
        return None
    # A limit of verifiers has ended it.
    return (await episode.astep("", "length")).grade


class NmoeTaskset(vf.Taskset[NmoeTask, NmoeConfig]):
    """The problems of an environment, in the order of its pool."""

    def __init__(self, config: NmoeConfig) -> None:
        super().__init__(config)
        if not config.environment:
            raise UserError("say which environment of nmoe: --env.taskset.environment NAME")
        path = Path(config.environment)
        self._named = str(path.resolve()) if path.exists() else config.environment  # workers have other directories
        self._shared = shared_by_name(self._named, config.stage)
        self.INFINITE = self._shared.size(config.split) is None

    def load(self) -> Iterator[NmoeTask]:
        size = self._shared.size(self.config.split)
        for position in itertools.count() if size is None else range(size):
            row = self._shared.row(position, self.config.split)
            messages = self._shared.with_tools(row["prompt"])
            system = messages[0]["content"] if messages[0]["role"] == "system" else None
            asked = messages[0 if system is None else 1 :]
            yield NmoeTask(
                NmoeData(
                    name=row["label"],
                    prompt=asked[0]["content"] if len(asked) == 1 else asked,
                    system_prompt=system,
                    environment=self._named,
                    stage=self.config.stage,
                    opens_reasoning=self.config.opens_reasoning,
                    label=row["label"],
                ),
                self.config.task,
            )
