"""The settings of self-play: how many judge a proof, how many have to agree, and what is trained on what they agree on."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from nmoe.config.base import Conflict, FromFile, Section
from nmoe.config.environment import EnvironmentSettings, SelfplayPool
from nmoe.config.packaged import find_environment
from nmoe.config.run import (
    EngineSection,
    GroupBatchSection,
    PolicyLossSection,
    RunConfig,
    RunSection,
    SampleRateSection,
    SamplingSection,
)
from nmoe.config.sandbox import SandboxSettings


class SelfplayRunSection(RunSection):
    """[run] of self-play."""

    steps: int = Field(
        default=1,
        gt=0,
        description="optimizer steps of the verifier over all rounds; without training, none",
    )


class SelfplaySection(Section):
    """[selfplay]: how many judge a proof, and what is trained on their judgement."""

    problem_source: str | None = Field(
        default=None,
        min_length=1,
        description="prm800k[:PATH], math_shepherd[:PATH], hf:NAME[:SUBSET]:SPLIT, deepseek_math_v2_inputs:PATH or jsonl:PATH; "
        "default: that of [environment]",
    )
    problem_field: str | None = Field(
        default=None,
        min_length=1,
        description="the field with the problem's text; default: the first there of problem, question, prompt, input",
    )
    max_problems: int = Field(default=1000, gt=0, description="the most problems of one round")
    verifications: int = Field(default=8, gt=0, description="verifications of each proof (n)")
    meta_verifications: int = Field(default=3, gt=0, description="checks of each verification that claims a defect (m)")
    confirmations: int = Field(
        default=2, gt=0, description="confirmed verifications that the lowest score needs to stand (k)"
    )
    verifier: str | None = Field(
        default=None,
        min_length=1,
        description="checkpoint of verifier and meta-verifier; default: model.path, which is the generator",
    )
    train: bool = Field(default=False, description="train verifier and generator at the end of each round")
    rounds: int = Field(default=1, gt=0, description="rounds of generation, each with its training")
    generator_steps: int = Field(
        default=2,
        gt=0,
        description="optimizer steps of a round that the generator takes, each on its part of the problems, beside the verifier's "
        "first ones",
    )
    verifier_epochs: int = Field(default=1, gt=0, description="passes over a round's accepted verifications")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.confirmations > self.verifications:
            yield Conflict(
                "confirmations", f"are more than the verifications = {self.verifications}: nothing could stand"
            )
        if self.rounds > 1 and not self.train:
            yield Conflict("rounds", "differ by what is trained between them; set train, or raise max_problems")


class SelfplayEvalSection(Section):
    """[eval] of self-play, which evaluates before the first round and after each that trains."""

    problems: int = Field(default=200, gt=0, description="held-out problems of one evaluation")
    environment: Annotated[EnvironmentSettings | None, FromFile(find_environment)] = Field(
        default=None, description="what the verifier is asked, or its `path`; without it nothing is evaluated"
    )


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
    eval: SelfplayEvalSection = Field(default=SelfplayEvalSection(), description="evaluation of the verifier")
    monitor: SampleRateSection = Field(default=SampleRateSection(), description="what is kept of rollouts")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.environment is not None:
            yield from self._environment_conflicts(self.environment)
        elif self.selfplay.problem_source is None:
            yield Conflict("selfplay.problem_source", "says where the problems are; or name an [environment] that does")
        if self.sampling.temperature == 0:
            yield Conflict("sampling.temperature", "at 0 all verifications of a proof are alike, and count once")
        if self.selfplay.train:
            yield from self._training_conflicts()

    def _environment_conflicts(self, environment: EnvironmentSettings) -> Iterator[Conflict]:
        if not isinstance(environment.task_pool, SelfplayPool):
            yield Conflict("environment.task_pool.type", 'must be "selfplay": problems without answers')
        for key in ("rubric", "curriculum"):
            if getattr(environment, key) is not None:
                yield Conflict(f"environment.{key}", "self-play has rewards of its own, for each role; leave it out")
        if environment.rewards:
            yield Conflict("environment.rewards", "self-play has rewards of its own, for each role; leave them out")

    def _training_conflicts(self) -> Iterator[Conflict]:
        if self.sampling.top_p < 1 or self.sampling.top_k:
            yield Conflict("sampling", "the streams do not keep cut supports; train with top_p = 1 and top_k = 0")
        if self.run.steps % self.selfplay.rounds:
            yield Conflict(
                "run.steps", f"are dealt out evenly over selfplay.rounds = {self.selfplay.rounds}; take a multiple"
            )
        elif self.selfplay.generator_steps > self.run.steps // self.selfplay.rounds:
            yield Conflict(
                "selfplay.generator_steps",
                f"are more than the steps of a round, run.steps / selfplay.rounds = {self.run.steps // self.selfplay.rounds}",
            )
        if self.batch.group_size < 2:
            yield Conflict("batch.group_size", "must be at least 2: a proof's reward is compared with that of others")
        if self.algorithm.overlong_buffer > self.sampling.max_new_tokens:
            yield Conflict(
                "algorithm.overlong_buffer", f"is more than sampling.max_new_tokens = {self.sampling.max_new_tokens}"
            )
