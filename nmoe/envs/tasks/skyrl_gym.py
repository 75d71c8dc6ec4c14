"""Environments of the package skyrl-gym, which belongs to SkyRL, played in this process: `init`, `step`, `close`.

A record is one of SkyRL's datasets: `prompt`, `env_class` and what that environment reads, such as `reward_spec`:

    {"prompt": [{"role": "user", "content": "..."}], "env_class": "gsm8k_multi_turn",
     "reward_spec": {"ground_truth": "72"}, "extra_info": {"max_turns": 5}}

The environment gets the whole record as `extras`, and the policy's turn as text without reasoning. Its methods may block, so each
episode has a thread, in which its calls run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nmoe.envs.tasks.conversation import AssistantTurn
from nmoe.envs.tasks.live import LiveEpisode
from nmoe.envs.tasks.own import Prompt, Record
from nmoe.envs.user_code import OneThread
from nmoe.errors import UserError
from nmoe.extras import needed_by

_RIGHT = {"gsm8k": "#### {}", "gsm8k_multi_turn": "#### {}", "aime": "Answer: {}"}


class SkyrlGymEpisode(LiveEpisode):
    """Plays the environment that a record names. A subclass may set `env_class` for records that name none, and `env_config`, the
    settings that SkyRL gives to all environments of a class.
    """

    env_class: str | None = None
    env_config: Mapping[str, Any] | None = None
    _env: Any = None

    def __init__(self) -> None:
        self._thread = OneThread()

    async def open(self, record: Record, seed: int) -> Prompt:
        messages, _ = await self._thread.run(self._begin, record)
        return list(messages)

    def _begin(self, record: Record) -> Any:
        with needed_by("the task skyrl_gym", "skyrl-gym"):
            import skyrl_gym
        name, prompt = record.get("env_class", self.env_class), record.get("prompt")
        if not isinstance(name, str) or name not in skyrl_gym.registry:
            raise UserError(f"env_class is {name!r}, and skyrl-gym has {', '.join(sorted(skyrl_gym.registry))}")
        if not isinstance(prompt, Sequence) or isinstance(prompt, str):
            raise UserError(f"the prompt of a record for skyrl-gym is a list of messages, not {prompt!r}")
        # SkyRL's loader always adds these.
        extras = {"extra_info": {}, **record}
        self._env = skyrl_gym.make(name, env_config=dict(self.env_config or {}), extras=extras)
        return self._env.init(list(prompt))

    async def step(self, turn: AssistantTurn) -> tuple[Prompt | None, float, bool]:
        answered: Mapping[str, Any] = await self._thread.run(self._env.step, turn.text)
        self.info = {"metadata": _plain(answered.get("metadata") or {})}
        if answered.get("postprocessed_action") not in (None, turn.text):
            raise UserError(
                "the environment replaces what the policy said (postprocessed_action); other text would have to be encoded again, "
                "and the policy did not sample it"
            )
        return list(answered["observations"]), answered["reward"], answered["done"]

    async def close(self) -> None:
        # It may be the first to wait for what came late, so that only the thread knows whether there is an environment.
        try:
            await self._thread.run(self._end)
        finally:
            self._thread.end()

    @classmethod
    def gold(cls, record: Record) -> str:
        """Returns the ground truth as the package's environments of short answers want it written."""
        rule: Mapping[str, Any] = record.get("reward_spec") or record.get("reward_model") or {}
        form = _RIGHT.get(str(record.get("env_class", cls.env_class)))
        return form.format(rule["ground_truth"]) if form and "ground_truth" in rule else ""

    def _end(self) -> None:
        if self._env is not None:
            self._env.close()


def _plain(value: Any) -> Any:
    """Returns what JSON keeps of a value: anything else as its repr."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and value - value == 0):
        return value
    return repr(value)
