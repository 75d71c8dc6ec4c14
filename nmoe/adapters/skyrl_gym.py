"""Environments of nmoe as environments of SkyRL-Gym, with tools and turns of the user. In the training entry point:

    from skyrl_gym.envs import register
    register(id="nmoe", entry_point="nmoe.adapters.skyrl_gym:NmoeEnv")

`nmoe env records ENVIRONMENT train.jsonl` writes the dataset. Tested with skyrl-gym 0.4.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

from nmoe.adapters.environment import SharedEpisode, shared_by_name
from nmoe.adapters.messages import as_users
from nmoe.errors import UserError
from nmoe.types import Grade


class NmoeEnv(BaseTextEnv):
    """Plays the environment of nmoe that a record names (`environment`), or `register(..., kwargs={"environment": NAME})` does.

    `reward_spec.ground_truth` is the label of the record. All of the reward is paid at the end. What tools answer comes as the
    user's message, as Qwen's templates write it. SkyRL does not say whether a turn was cut: set
    `generator.zero_reward_on_non_stop`, without which an answer of which only the beginning was sampled may be paid. `kwargs` take
    `opens_reasoning` too, for a chat template whose prompts end in an opened think tag. Rewards that compare the samples of a
    group, or read tokens or steps, are refused.
    """

    def __init__(
        self,
        env_config: Any = None,
        extras: Mapping[str, Any] | None = None,
        environment: str | None = None,
        stage: str | None = None,
        opens_reasoning: bool | None = None,
    ) -> None:
        """Reads the record `extras`. Raises UserError for a record that `nmoe env records` did not write."""
        super().__init__()
        record = extras or {}
        # The entry point's name counts before the one of a file: to load an environment is to run its code.
        named = record.get("environment") if environment is None else environment
        spec = record.get("reward_spec")
        label = spec.get("ground_truth") if isinstance(spec, Mapping) else None
        if not isinstance(named, str) or not isinstance(label, str):
            raise UserError(
                "a record for the environment nmoe has `environment`, a name or path, and `reward_spec.ground_truth`, a label; "
                "write records by `nmoe env records ENVIRONMENT train.jsonl`"
            )
        self._named, self._stage, self._label = named, stage, label
        self._opens_reasoning = opens_reasoning
        self._components: list[str] = []
        self._most = record.get("max_turns")
        self._episode: SharedEpisode | None = None
        self._grade: Grade | None = None

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        shared = shared_by_name(self._named, self._stage)
        self.max_turns = shared.turns
        if isinstance(self._most, int) and self._most < self.max_turns:
            raise UserError(
                f"generator.max_turns is {self._most}, and an episode of {self._named} has up to {self.max_turns} turns "
                "(budget.turns); set it to that"
            )
        self._components = shared.components
        self._episode = shared.episode(self._label, opens_reasoning=self._opens_reasoning)
        asked = self._episode.begin()
        return (shared.with_tools(asked) if shared.asks_itself else prompt), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self._episode is None:
            raise UserError("step() before init(prompt)")
        self.turns += 1
        step = self._episode.step(action)
        self._grade = step.grade
        return BaseTextEnvStepOutput(
            observations=as_users(step.messages),
            reward=0.0 if step.grade is None else step.grade.score,
            done=step.done,
            metadata={} if step.grade is None else {"failure": step.grade.failure, **self._graded()},
        )

    def close(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns, **self._graded()}

    def _graded(self) -> dict[str, float]:
        components = {} if self._grade is None else self._grade.components
        return {name: components[name] for name in self._components if name in components}
