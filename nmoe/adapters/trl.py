"""Environments of nmoe as reward functions of TRL:

    from transformers import AutoTokenizer, GenerationConfig
    from trl import GRPOTrainer
    from nmoe.adapters.trl import dataset, reward_function

    model = "Qwen/Qwen2.5-0.5B-Instruct"
    ends = GenerationConfig.from_pretrained(model).eos_token_id
    reward = reward_function("word_problems", AutoTokenizer.from_pretrained(model), eos_token_id=ends)
    trainer = GRPOTrainer(model, [reward], train_dataset=dataset("word_problems", 1000))

Tested with TRL 1.16.0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nmoe.adapters.environment import Finish, SharedEnvironment, Split
from nmoe.adapters.messages import Said
from nmoe.api.environments import Env
from nmoe.errors import UserError
from nmoe.text.conversation import THINK
from nmoe.types import TrainerState

if TYPE_CHECKING:
    from datasets import Dataset

Completion = str | Sequence[dict[str, Any]]


def dataset(environment: Env | SharedEnvironment, count: int | None = None, *, split: Split = "train") -> Dataset:
    """Returns the first `count` problems, by default all, as a dataset with the columns `prompt`, a conversation, and `label`, by
    which `reward_function` finds the problem again."""
    from datasets import Dataset

    return Dataset.from_list(_shared(environment).rows(count, split=split))


def reward_function(
    environment: Env | SharedEnvironment,
    tokenizer: Any,
    *,
    eos_token_id: int | Collection[int] | None,
    stage: str | None = None,
    num_generations: int | None = None,
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., list[float]]:
    """Returns a reward function for `reward_funcs` of `GRPOTrainer`, with the name of the environment.

    `tokenizer` and `chat_template_kwargs` are the trainer's, and `eos_token_id` is the one of the model's generation settings. A
    completion that ends neither in such a token nor in the tokenizer's was cut, and earns nothing: the number that is last in it is
    no answer. The chat template says whether its prompts open the reasoning, which a completion then only closes. A reward of your
    own that compares the samples of a group (`replay = false`) needs `num_generations`, which evaluation has to share, and whole
    groups in each process. The components of the grades are logged under the environment's name.

    The function raises UserError for rows without the column `label`, InfrastructureError for a completion whose grade was lost,
    and what a grader raises. Raises UserError for an environment with tools or a conversation.
    """
    shared = _shared(environment, stage)
    if shared.takes_turns:
        raise UserError(
            f"environment {shared.name!r} has tools or answers the policy, and a reward function sees the end alone; play it in "
            "SkyRL or verifiers, or train with nmoe"
        )
    if shared.compares and num_generations is None:
        raise UserError(
            f"environment {shared.name!r}: the reward {shared.compares[0]!r} (replay = false) compares the samples of a group; "
            "give reward_function the trainer's num_generations"
        )
    named = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ()
    ends = {tokenizer.eos_token_id, *named}
    opens_reasoning = _opens_reasoning(tokenizer, chat_template_kwargs)

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
        if completion_ids is None:
            raise UserError("the trainer gives no completion_ids, by which completions that were cut are known")
        finishes: list[Finish] = ["stop" if ids and ids[-1] in ends else "length" for ids in completion_ids]
        state = trainer_state and TrainerState(trainer_state.global_step, trainer_state.max_steps)
        grades = shared.grade(
            label,
            [_said(one) for one in completions],
            finishes,
            opens_reasoning=opens_reasoning,
            samples=num_generations,
            completion_ids=completion_ids,
            state=state,
        )
        for name in shared.components if log_metric is not None else ():
            # A reward leaves its component out where it returns None.
            values = [one.components[name] for one in grades if name in one.components]
            if values and log_metric is not None:
                log_metric(f"{shared.name}/{name}", sum(values) / len(values))
        return [grade.score for grade in grades]

    reward.__name__ = shared.name
    return reward


def _opens_reasoning(tokenizer: Any, arguments: Mapping[str, Any]) -> bool:
    """Returns whether the prompts of a tokenizer's chat template end in an opened think tag."""
    asked = [{"role": "user", "content": "?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False, **arguments)
    return bool(prompt.rstrip().endswith(THINK))


def _said(completion: Completion) -> Said:
    if isinstance(completion, str):
        return completion
    if len(completion) != 1:
        raise UserError(f"a completion has {len(completion)} messages, and the environment has one turn of the policy")
    return completion[0]


def _shared(environment: Env | SharedEnvironment, stage: str | None = None) -> SharedEnvironment:
    return environment if isinstance(environment, SharedEnvironment) else SharedEnvironment(environment, stage=stage)
