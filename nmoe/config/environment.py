"""Schema of an environment: its problems, the format of its answers, and how answers are rewarded.

An environment is either a separate TOML file or the `[environment]` table of a run; both have this schema. Relative paths in a
separate file start from that file's directory, in a run's table from the working directory of the command.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nmoe.config.base import MAX_SEED, Array, Conflict, NameIn, Section, duplicates
from nmoe.config.registry import TASKS
from nmoe.config.tables.pools import GeneratedPool, MixturePool, ReasoningGymPool, TaskPool, task_types
from nmoe.config.tables.rewards import CurriculumSettings, RewardConfig, Rubric, Weights
from nmoe.config.tables.rollout import BudgetSettings, ToolsSettings, WorkspaceSettings


class SystemByFormat(Section):
    """[system_by_format]: a system message for one format, in place of `system`."""

    harmony: str | None = None
    """for Harmony"""
    chat: str | None = None
    """for the tokenizer's chat template"""
    boxed: str | None = None
    """for plain text"""


class EnvironmentSettings(Section):
    """An environment: its problems (task pool), the format of answers, rewards, tools and limits."""

    own_file: ClassVar[bool] = True

    env_id: str = Field(min_length=1)
    """name of the environment"""
    version: str = Field(default="1", min_length=1)
    """version of the environment; change it when grading or problems change"""
    description: str = ""
    """one line, shown in lists of environments"""
    format: Literal["auto", "harmony", "chat", "boxed"] = "auto"
    r"""Harmony messages, messages by the tokenizer's chat template, or plain text with the answer in \boxed{}; auto: Harmony if the
    tokenizer has its control tokens, else its chat template"""
    extraction: Literal["last_number", "prose"] = "last_number"
    """how the answer is found in a message without a box. last_number: its last number; prose: the text after `the answer is`
    and the like, else its last formula or number (docs/guides/grading.md)"""
    system: str = ""
    """system message before every problem; empty: none"""
    system_by_format: SystemByFormat = SystemByFormat()
    """system messages for particular formats, in place of `system`"""
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    """reasoning effort requested of the model: a line of Harmony's system message, or `reasoning_effort` of a chat template that
    has it; default: no request"""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """variables passed to the tokenizer's chat template, as in transformers and vLLM, such as `{enable_thinking = false}`"""
    task: Annotated[str | None, NameIn(TASKS)] = None
    """task of every pool that sets no `task_type`: a name, or your own class as `package.module:Name`"""
    task_pool: TaskPool = Field(discriminator="type")
    """where the problems come from; default: `task` generates them"""
    rubric: Rubric | None = None
    """weights of the reward's components; default: only correctness"""
    curriculum: CurriculumSettings | None = None
    """weights that change from stage to stage, as the policy learns"""
    tools: ToolsSettings | None = None
    """tools that the policy may call"""
    budget: BudgetSettings = BudgetSettings()
    """limits of one trajectory"""
    workspace: WorkspaceSettings | None = None
    """files that each trajectory starts with"""
    rewards: Array[RewardConfig] = ()
    """rewards in addition to the rubric's components, as [[rewards]]; docs/guides/rewards.md"""

    @model_validator(mode="before")
    @classmethod
    def _task_of_pools(cls, data: Any) -> Any:
        """Copies `task` into pools without a `task_type`, and adds a pool that generates problems if there is no pool."""
        if not isinstance(data, dict) or not isinstance(task := data.get("task"), str):
            return data
        pool = data.get("task_pool", {"type": "generated"})
        if isinstance(pool, dict):
            if isinstance(pool.get("sources"), list):
                pool = {**pool, "sources": [_with_task(source, task) for source in pool["sources"]]}
            data = {**data, "task_pool": _with_task(pool, task)}
        return data

    def conflicts(self) -> Iterator[Conflict]:
        if self.rubric is not None and self.curriculum is not None:
            yield Conflict("rubric", "the weights of the curriculum's stages apply; drop [rubric] or [curriculum]")
        own = getattr(self.task_pool, "task_type", None)
        if self.task is not None and own not in (None, self.task):
            yield Conflict("task", f"task_pool.task_type = {own!r} says another task; drop one of the two")
        if self.tools is not None and self.format == "boxed":
            yield Conflict("tools", "the boxed format has no tool calls; use harmony or chat")
        if self.reasoning_effort is not None and self.format == "boxed":
            yield Conflict("reasoning_effort", "plain text has no place for it; ask for it in `system`")
        yield from duplicates("rewards", (reward.name for reward in self.rewards))
        if "open" in task_types(self.task_pool) and not self._rewards_open_problems():
            yield Conflict(
                "task_pool", "open problems have no right answer, so correctness cannot reward them; add [[rewards]]"
            )
        if task_types(self.task_pool) == {"open"}:
            for index, reward in enumerate(self.rewards):
                if reward.only_if_correct:
                    yield Conflict(f"rewards.{index}.only_if_correct", "open problems have no right answer; drop it")
            for index, stage in enumerate(() if self.curriculum is None else self.curriculum.stages):
                if stage.gate is not None and stage.gate.metric == "correctness":
                    yield Conflict(
                        f"curriculum.stages.{index}.gate", "open problems have no right answer, so it would never open"
                    )
        if not any(reward.weight for reward in self.rewards):
            stages = () if self.curriculum is None else self.curriculum.stages
            weighed = {f"curriculum.stages.{index}.weights": stage.weights for index, stage in enumerate(stages)}
            if self.rubric is not None:
                weighed["rubric"] = self.rubric
            for key, weights in weighed.items():
                if weights.all_zero:
                    yield Conflict(key, "all weights are 0, so every reward would be 0")

    @property
    def rewards_efficiency(self) -> bool:
        """Whether efficiency has a weight in the rubric or in a stage."""
        return any(one.efficiency for one in self._weights())

    def _weights(self) -> list[Weights]:
        stages = () if self.curriculum is None else self.curriculum.stages
        return [*(stage.weights for stage in stages), *([] if self.rubric is None else [self.rubric])]

    def _rewards_open_problems(self) -> bool:
        """Returns whether anything other than correctness and efficiency is rewarded, so that open problems (without an answer) can
        earn a reward."""
        beside = any(any(one.model_dump(exclude={"correctness", "efficiency"}).values()) for one in self._weights())
        return beside or any(reward.weight for reward in self.rewards)


def _with_task(pool: Any, task: str) -> Any:
    if not isinstance(pool, dict) or pool.get("type") in ("reasoning_gym", "prm", "selfplay", "mixture"):
        return pool
    return {"task_type": task, **pool}


def held_out(
    settings: EnvironmentSettings, split: Literal["validation", "eval"] = "eval"
) -> EnvironmentSettings | None:
    """Returns the same environment with held-out problems: its generated and reasoning-gym pools use `split`.

    None if training may contain those problems: a pool is a dataset, or does not train on the `train` split.
    """
    pool = settings.task_pool
    if isinstance(pool, GeneratedPool | ReasoningGymPool) and pool.split == "train":
        pool = pool.model_copy(update={"split": split})
    elif isinstance(pool, MixturePool) and all(
        isinstance(source, GeneratedPool | ReasoningGymPool) and source.split == "train" for source in pool.sources
    ):
        sources = tuple(source.model_copy(update={"split": split}) for source in pool.sources)
        pool = pool.model_copy(update={"sources": sources})
    else:
        return None
    return settings.model_copy(update={"task_pool": pool})


def reseeded(settings: EnvironmentSettings, seed: int) -> EnvironmentSettings:
    """Returns the same environment with `seed` added to the seed of every pool, so that the run's seed determines the problems."""

    def moved(pool: TaskPool) -> TaskPool:
        update: dict[str, object] = {"seed": (pool.seed + seed) % (MAX_SEED + 1)}
        if isinstance(pool, MixturePool):
            update["sources"] = tuple(moved(source) for source in pool.sources)
        return pool.model_copy(update=update)

    return settings.model_copy(update={"task_pool": moved(settings.task_pool)})
