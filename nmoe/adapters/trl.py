"""Environments of nmoe as reward functions of TRL:

    from trl import GRPOConfig, GRPOTrainer
    from nmoe.adapters.trl import dataset, reward_function

    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=reward_function("word_problems"),
        train_dataset=dataset("word_problems", 1000),
    )

Tested with TRL 1.16.0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from nmoe.adapters.environment import Finish, SharedEnvironment, Split
from nmoe.adapters.messages import Said
from nmoe.api.environments import Env
from nmoe.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Completion = str | Sequence[dict[str, Any]]


def dataset(environment: Env | SharedEnvironment, count: int | None = None, *, split: Split = "train") -> Dataset:
    """Returns the first `count` problems, by default all, as a dataset with the columns `prompt`, a conversation, and `label`, by
    which `reward_function` finds the problem again."""
    from datasets import Dataset

    return Dataset.from_list(_shared(environment).rows(count, split=split))


def reward_function(
    environment: Env | SharedEnvironment, *, stage: str | None = None, eos_token_id: int | Collection[int] | None = None
) -> Callable[..., list[float]]:
    """Returns a reward function for `reward_funcs` of `GRPOTrainer`, with the name of the environment.

    With `eos_token_id`, the trainer's, a completion that does not end in such a token counts as cut, and earns nothing, because the
    number that is last in it is no answer. The components of the grades are logged under the environment's name.

    The function raises UserError for rows without the column `label`, InfrastructureError for a completion whose grade was lost,
    and what a grader raises. Raises UserError for an environment with tools or a conversation.
    """
    shared = _shared(environment, stage)
    if shared.takes_turns:
        raise UserError(
            f"environment {shared.name!r} has tools or answers the policy, and a reward function sees the end alone; play it in "
            "SkyRL or verifiers, or train with nmoe"
        )
    ends = {eos_token_id} if isinstance(eos_token_id, int) else None if eos_token_id is None else set(eos_token_id)

    def reward(
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        label: Sequence[str] | None = None,
        trainer_state: Any = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float]:
        if label is None:
            raise UserError("the dataset has no column `label`; make it by nmoe.adapters.trl.dataset")
        finishes: list[Finish] | None = None
        if ends is not None:
            if completion_ids is None:
                raise UserError(
                    "the trainer gives no completion_ids, by which eos_token_id could be found; leave it out"
                )
            finishes = ["stop" if ids and ids[-1] in ends else "length" for ids in completion_ids]
        step = 0 if trainer_state is None else trainer_state.global_step
        grades = shared.grade(label, [_said(one) for one in completions], finishes, step)
        if log_metric is not None:
            for name in shared.components:
                log_metric(f"{shared.name}/{name}", sum(one.components.get(name, 0.0) for one in grades) / len(grades))
        return [grade.score for grade in grades]

    reward.__name__ = shared.name
    return reward


def _said(completion: Completion) -> Said:
    if isinstance(completion, str):
        return completion
    if len(completion) != 1:
        raise UserError(f"a completion has {len(completion)} messages, and the environment has one turn of the policy")
    return completion[0]


def _shared(environment: Env | SharedEnvironment, stage: str | None = None) -> SharedEnvironment:
    return environment if isinstance(environment, SharedEnvironment) else SharedEnvironment(environment, stage=stage)
