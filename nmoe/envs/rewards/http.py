"""A reward that a service computes. One request covers one group:

    POST url    {"prompts": ["Sort: 312", ...], "completions": ["123", ...], "columns": {"gold": ["123", ...], ...}}
    200         {"rewards": [1.0, null, ...]}

Prompts and completions are strings or message lists, as for functions; null leaves the component out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from nmoe.config.tables.rewards import HttpRewardConfig
from nmoe.envs.rewards.reward import Rating, RewardError, Samples, UnavailableError
from nmoe.envs.rewards.service import Service
from nmoe.envs.rewards.values import checked_values


class HttpReward:
    """A reward computed by a service."""

    def __init__(self, settings: HttpRewardConfig, service: Service | None = None) -> None:
        """Raises UserError if the token's environment variable is not set."""
        self.name, self.weight = settings.name, settings.weight
        self.only_if_correct = settings.only_if_correct
        self._who = f"reward {settings.name!r} ({settings.url})"
        self._service = service or Service(settings)

    def opened(self) -> AbstractAsyncContextManager[Any]:
        return self._service.opened()

    async def rate(self, samples: Samples) -> Sequence[Rating]:
        count = len(samples.completions)
        content = {
            "prompts": [samples.prompt] * count,
            "completions": list(samples.completions),
            "columns": {name: [value] * count for name, value in samples.columns.items()},
        }
        try:
            answer = await self._service.post(content)
        except UnavailableError as error:
            return [Rating(None, f"reward {self.name!r}: {error}")] * count
        if not isinstance(answer, dict) or not isinstance(answer.get("rewards"), list):
            raise RewardError(f'{self._who} answered {str(answer)[:200]!r}; it has to answer {{"rewards": [...]}}')
        return [Rating(value) for value in checked_values(self._who, answer["rewards"], count)]
