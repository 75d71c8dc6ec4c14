"""Functions of `[[rewards]]` where another trainer samples the policy: the tokens and the steps are that trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from nmoe.config.tables.rewards import FunctionRewardConfig, RewardConfig, RewardModelRewardConfig, VerifierRewardConfig
from nmoe.envs.rewards.function import FunctionReward
from nmoe.envs.rewards.reward import Reward, RewardError, Samples
from nmoe.errors import UserError
from nmoe.types import TrainerState

_TRAINERS = ("completion_ids", "trainer_state")


@dataclass(frozen=True)
class FromTrainer:
    """What a trainer says of the group that is graded: the policy's tokens of each completion, and its own step. None of either
    where it does not say."""

    completion_ids: Sequence[Sequence[int]] | None = None
    state: TrainerState | None = None


FROM_TRAINER: ContextVar[FromTrainer] = ContextVar("from_trainer")
"""The trainer's part of the group that the task grades."""


class SharedFunction(FunctionReward):
    """A function that gets `completion_ids` and `trainer_state` as the trainer gave them. The environment has neither: its tokens
    are bytes, and it counts no steps."""

    @property
    def wants(self) -> list[str]:
        """The trainer's arguments that the function names."""
        return [name for name in _TRAINERS if name in self._names]

    def standard(self, samples: Samples) -> dict[str, Any]:
        given, known = FROM_TRAINER.get(), super().standard(samples)
        del known["completion_ids"], known["trainer_state"]
        if given.completion_ids is not None:
            known["completion_ids"] = [list(given.completion_ids[one.index]) for one in samples.trajectories]
        if given.state is not None:
            known["trainer_state"] = given.state
        if missing := [name for name in self.wants if name not in known]:
            raise RewardError(f"{self._who} takes {' and '.join(missing)}, and here the trainer gives none")
        return known


def shared_rewards(env_id: str, loaded: Sequence[Reward], settings: Sequence[RewardConfig]) -> list[Reward]:
    """Returns an environment's rewards as another trainer can have them. Raises UserError for rewards by models of nmoe, which only
    a run of nmoe loads."""
    for one in settings:
        if isinstance(one, VerifierRewardConfig | RewardModelRewardConfig):
            raise UserError(
                f"environment {env_id!r}: the reward {one.name!r} is of type {one.type!r}, whose model only a run of nmoe loads; "
                "another trainer can have judges, services and functions"
            )
    return [
        SharedFunction(one) if isinstance(one, FunctionRewardConfig) else reward
        for reward, one in zip(loaded, settings, strict=True)
    ]


def comparing(settings: Sequence[RewardConfig]) -> list[str]:
    """Returns the names of the rewards that compare the samples of a group, as their `replay = false` says."""
    return [one.name for one in settings if isinstance(one, FunctionRewardConfig) and not one.replay]


def check_alone(env_id: str, rewards: Sequence[Reward], settings: Sequence[RewardConfig]) -> None:
    """Raises UserError for rewards that need more than one completion."""
    if names := comparing(settings):
        raise UserError(
            f"environment {env_id!r}: the reward {names[0]!r} has replay = false, as one that compares the samples of a group, and "
            "this trainer hands over one completion at a time; leave it out, set replay = true if it rates each alone, or train "
            "with TRL or nmoe"
        )
    for reward in rewards:
        if isinstance(reward, SharedFunction) and reward.wants:
            raise UserError(
                f"environment {env_id!r}: the reward {reward.name!r} takes {' and '.join(reward.wants)}, which this trainer does "
                "not hand over; leave the arguments out, or train with TRL or nmoe"
            )
