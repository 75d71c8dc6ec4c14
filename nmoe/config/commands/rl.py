"""The configuration of `nmoe rl train`."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from nmoe.config.base import Array, Conflict, FromFile
from nmoe.config.commands.base import AdaptableConfig
from nmoe.config.environment import EnvironmentSettings, held_out
from nmoe.config.packaged import find_environment
from nmoe.config.tables.algorithm import AlgorithmSection, BatchSection, CriticSection, DistillationSection
from nmoe.config.tables.evaluation import RLEvalSection, confusable, without_place
from nmoe.config.tables.monitor import MonitorSection
from nmoe.config.tables.pools import task_types
from nmoe.config.tables.rollout import EngineSection, SamplingSection, SandboxSettings
from nmoe.config.tables.run import RLRunSection


class RLConfig(AdaptableConfig):
    """A run of `nmoe rl train`: [environment] is required."""

    run: RLRunSection = Field(default=RLRunSection(), description="name, length, seed")
    environment: Annotated[EnvironmentSettings, FromFile(find_environment)] = Field(
        description="the environment, or its `path`: a TOML file, a directory, or a packaged name"
    )
    sandbox: SandboxSettings = Field(default=SandboxSettings(), description="isolation of tools and tests")
    engine: EngineSection = Field(default=EngineSection(), description="rollout engine")
    sampling: SamplingSection = Field(default=SamplingSection(), description="sampling distribution")
    batch: BatchSection = Field(default=BatchSection(), description="batch sizes")
    algorithm: AlgorithmSection = Field(default=AlgorithmSection(), description="policy gradient")
    critic: CriticSection | None = Field(default=None, description="the critic of PPO")
    distillation: DistillationSection | None = Field(default=None, description="a teacher in place of rewards")
    eval: Array[RLEvalSection] = Field(default=(), description="evaluations during the run, as [[eval]]")
    monitor: MonitorSection = Field(default=MonitorSection(), description="rules that watch the run; kept rollouts")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        steps, episodes, shape = self.run.steps, self.run.episodes, self.model.shape
        if steps == 0 and episodes is None:
            yield Conflict("run.steps", "must be more than 0, unless run.episodes is given")
        if steps > 0 and episodes is not None:
            yield Conflict("run.steps", f"excludes run.episodes = {episodes:g}; give one of the two")
        if shape is not None and self.sampling.max_new_tokens >= shape.context_tokens:
            yield Conflict(
                "sampling.max_new_tokens",
                f"leaves no room for a prompt in model.shape.context_tokens = {shape.context_tokens}",
            )
        yield from self._algorithm_conflicts()
        if "open" in task_types(self.environment.task_pool):
            if self.batch.favour_unsolved:
                yield Conflict(
                    "batch.favour_unsolved", "open problems are never solved, so they would be drawn most often"
                )
            if self.algorithm.length_penalty:
                yield Conflict(
                    "algorithm.length_penalty",
                    "pays for short right answers, and open problems have none; use algorithm.overlong_buffer or a [[rewards]]",
                )
        if self.sampling.temperature == 0:
            yield Conflict("sampling.temperature", "at 0 all completions of a group are equal, so nothing is learned")
        for index, probe in enumerate(self.eval):
            if probe.environment is None and held_out(self.environment) is None:
                yield Conflict(
                    f"eval.{index}.every_steps",
                    "the training problems have no eval split; name another environment in eval.environment, or train on a part of "
                    "them (`train[200:]`) and name one with the rest (`train[:200]`)",
                )
            yield from without_place(index, probe, probe.environment or self.environment)
        yield from confusable(dict(enumerate(self.eval)), self.environment.env_id)

    def _algorithm_conflicts(self) -> Iterator[Conflict]:
        algorithm, critic = self.algorithm, self.critic
        if algorithm.advantage == "gae" and critic is None:
            yield Conflict("algorithm.advantage", "gae needs a critic; add a [critic] table")
        if algorithm.advantage != "gae" and critic is not None:
            yield Conflict(
                "critic", f'advantage = "{algorithm.advantage}" uses no critic; set algorithm.advantage = "gae"'
            )
        if critic is not None and not critic.shared and (critic.path or self.model.path) is None:
            yield Conflict(
                "critic", "a separate critic starts from a checkpoint; name it in critic.path, or set shared"
            )
        if critic is not None and self.run.steps and critic.warmup_steps >= self.run.steps:
            yield Conflict("critic.warmup_steps", f"leaves no step for the policy (run.steps = {self.run.steps})")
        rewarded = self.distillation is None or self.distillation.reward_coef > 0
        if not rewarded and critic is not None:
            yield Conflict("critic", "distillation.reward_coef is 0, so there are no rewards for a critic to predict")
        if not rewarded and algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
            yield Conflict("algorithm.kl_in", "distillation.reward_coef is 0, so rewards do not count")
        if rewarded and algorithm.in_groups and self.batch.group_size < 2:
            yield Conflict(
                "batch.group_size", f'must be at least 2: advantage = "{algorithm.advantage}" compares within a group'
            )
        if algorithm.length_penalty and self.batch.group_size < 2:
            yield Conflict("algorithm.length_penalty", "compares lengths within a group, and batch.group_size is 1")
        if algorithm.overlong_buffer > self.sampling.max_new_tokens:
            yield Conflict(
                "algorithm.overlong_buffer", f"is more than sampling.max_new_tokens = {self.sampling.max_new_tokens}"
            )
        if algorithm.reference_every_steps and self.lora is not None:
            yield Conflict(
                "algorithm.reference_every_steps", "with a [lora] the reference is always the initial model; set 0"
            )
