"""The configuration of `nmoe selfplay`."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from nmoe.config.base import Array, Conflict, FromFile
from nmoe.config.commands.base import RunConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.packaged import find_environment
from nmoe.config.tables.algorithm import GroupBatchSection, PolicyLossSection
from nmoe.config.tables.evaluation import SelfplayEvalSection, only_one
from nmoe.config.tables.monitor import SampleRateSection
from nmoe.config.tables.pools import SelfplayPool
from nmoe.config.tables.recipes import SelfplaySection
from nmoe.config.tables.rollout import EngineSection, SamplingSection, SandboxSettings
from nmoe.config.tables.run import SelfplayRunSection


class SelfplayConfig(RunConfig):
    """A run of `nmoe selfplay`: [selfplay] is required. It trains whole models."""

    run: SelfplayRunSection = Field(description="name, length, seed")
    selfplay: SelfplaySection = Field(description="judges, rounds, training")
    environment: Annotated[EnvironmentSettings | None, FromFile(find_environment)] = Field(
        default=None, description="the environment, or its `path`; default: Harmony over selfplay.problem_source"
    )
    sandbox: SandboxSettings = Field(default=SandboxSettings(), description="isolation of tools and tests")
    engine: EngineSection = Field(default=EngineSection(), description="rollout engine")
    sampling: SamplingSection = Field(default=SamplingSection(), description="sampling distribution")
    batch: GroupBatchSection = Field(default=GroupBatchSection(), description="batch sizes")
    algorithm: PolicyLossSection = Field(default=PolicyLossSection(), description="policy gradient of the generator")
    eval: Array[SelfplayEvalSection] = Field(default=(), description="evaluation of the verifier, as [[eval]]")
    monitor: SampleRateSection = Field(
        default=SampleRateSection(), description="rules that watch the run; kept rollouts"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        yield from only_one(range(len(self.eval)), "the verifier is evaluated on one environment")
        if self.environment is not None:
            yield from self._environment_conflicts(self.environment)
        elif self.selfplay.problem_source is None:
            yield Conflict("selfplay.problem_source", "is required, or an [environment] with a task pool")
        if self.sampling.temperature == 0:
            yield Conflict("sampling.temperature", "at 0 all verifications of a proof are equal, and count once")
        if self.selfplay.train:
            yield from self._training_conflicts()

    @property
    def trains(self) -> bool:
        return self.selfplay.train

    def _environment_conflicts(self, environment: EnvironmentSettings) -> Iterator[Conflict]:
        if not isinstance(environment.task_pool, SelfplayPool):
            yield Conflict("environment.task_pool.type", 'must be "selfplay": problems without answers')
        for key in ("rubric", "curriculum"):
            if getattr(environment, key) is not None:
                yield Conflict(f"environment.{key}", "self-play has its own rewards for each role; leave it out")
        if environment.rewards:
            yield Conflict("environment.rewards", "self-play has its own rewards for each role; leave them out")

    def _training_conflicts(self) -> Iterator[Conflict]:
        if self.sampling.top_p < 1 or self.sampling.top_k:
            yield Conflict("sampling", "training needs the full distribution; set top_p = 1 and top_k = 0")
        if self.run.steps % self.selfplay.rounds:
            yield Conflict("run.steps", f"must be a multiple of selfplay.rounds = {self.selfplay.rounds}")
        elif self.selfplay.generator_steps > self.run.steps // self.selfplay.rounds:
            yield Conflict(
                "selfplay.generator_steps",
                f"are more than the steps of a round, run.steps / selfplay.rounds = {self.run.steps // self.selfplay.rounds}",
            )
        if self.batch.group_size < 2:
            yield Conflict("batch.group_size", "must be at least 2: the rewards of proofs are compared within a group")
        if self.algorithm.overlong_buffer > self.sampling.max_new_tokens:
            yield Conflict(
                "algorithm.overlong_buffer", f"is more than sampling.max_new_tokens = {self.sampling.max_new_tokens}"
            )
