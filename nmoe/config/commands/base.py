"""What the configurations of all training commands share, and how one is loaded.

Relative paths start from the directory that the command runs in, except those that name an environment's file, which start
from the file they stand in, as do the paths in that file.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from nmoe.config.base import Array, Conflict, Section
from nmoe.config.tables.algorithm import MicroBatchSection
from nmoe.config.tables.evaluation import (
    ExamplesEvalSection,
    HeldOutEvalSection,
    PeriodSection,
    confusable,
    only_one,
    without_place,
)
from nmoe.config.tables.model import LoraSection, ModelSection, ParallelSection
from nmoe.config.tables.monitor import WatchSection
from nmoe.config.tables.optimizer import OptimizerSection
from nmoe.config.tables.rollout import EngineSection, SandboxSettings
from nmoe.config.tables.run import CheckpointSection, RunSection, SinksSection


class RunConfig(Section):
    """What every run has. Each command has its own schema, which adds the tables that it reads: any other is refused."""

    run: RunSection = Field(description="name, length, seed")
    model: ModelSection = Field(description="checkpoint or shape")
    batch: MicroBatchSection = Field(default=MicroBatchSection(), description="batch sizes")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="optimizer and schedule")
    monitor: WatchSection = Field(default=WatchSection(), description="rules that watch the run")
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="checkpoints")
    parallel: ParallelSection = Field(default=ParallelSection(), description="ranks that train together")
    sinks: SinksSection = Field(default=SinksSection(), description="TensorBoard, W&B, trackio, CSV")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        shape = self.model.shape
        if shape is not None and self.batch.tokens_per_microbatch < shape.context_tokens:
            yield Conflict(
                "batch.tokens_per_microbatch",
                f"a sequence of model.shape.context_tokens = {shape.context_tokens} does not fit",
            )
        if self.trains and self.model.expert_weights == "mxfp4":
            yield Conflict(
                "model.expert_weights",
                "experts in mxfp4 can be sampled and not trained; leave it out. Self-play without selfplay.train takes it, and "
                "nmoe eval, chat and data pairs have --expert-weights",
            )

    @property
    def trains(self) -> bool:
        """Whether the run changes weights; self-play may only sample."""
        return True


class AdaptableConfig(RunConfig):
    """A run that trains all weights or an adapter."""

    lora: LoraSection | None = Field(default=None, description="train an adapter; without it, all weights")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.lora is not None and self.model.path is None:
            yield Conflict("lora", "an adapter needs a base; name its checkpoint in model.path")
        if self.lora is not None and self.model.expert_profile is not None:
            yield Conflict(
                "model.expert_profile",
                "an adapter is trained beside experts in the run's precision: merged into quantised ones it would be another "
                "policy; leave [lora] or model.expert_profile out",
            )
        if self.lora is not None and self.model.context_tokens is not None:
            yield Conflict(
                "model.context_tokens",
                "an adapter does not record it; write rope_scaling into the base's config.json instead",
            )


class SupervisedConfig(AdaptableConfig):
    """A run that learns from given examples."""

    eval: Array[PeriodSection] = Field(default=(), description="evaluation during the run, as [[eval]]")

    @property
    def probes(self) -> Mapping[int, ExamplesEvalSection]:
        """The [[eval]] tables that sample an environment, by number."""
        return {}

    @property
    def held_out_tables(self) -> list[int]:
        """The numbers of the [[eval]] tables that evaluate on held-out examples: one at most."""
        return [number for number in range(len(self.eval)) if number not in self.probes]

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations on held-out examples; 0: none."""
        return self.eval[self.held_out_tables[0]].every_steps if self.held_out_tables else 0

    @property
    def allows_trained_on(self) -> bool:
        """Whether the held-out examples may ask what is trained on."""
        tables = (self.eval[number] for number in self.held_out_tables)
        return any(isinstance(one, HeldOutEvalSection) and one.allow_trained_on for one in tables)

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        yield from only_one(self.held_out_tables, "the held-out examples are one set, evaluated in one way")


# The tables that nothing reads without a probe.
_OF_PROBES = frozenset({"engine", "sandbox"})


class ProbedConfig(SupervisedConfig):
    """A run that learns from given examples, and whose model [[eval]] tables may sample on environments meanwhile."""

    eval: Array[ExamplesEvalSection] = Field(
        default=(),
        description="evaluations during the run, as [[eval]]: held-out examples, or problems of an environment",
    )
    engine: EngineSection = Field(default=EngineSection(), description="engine that probes sample with")
    sandbox: SandboxSettings = Field(
        default=SandboxSettings(), description="isolation of the tools and tests of probes"
    )

    @property
    def probes(self) -> Mapping[int, ExamplesEvalSection]:
        return {number: one for number, one in enumerate(self.eval) if one.environment is not None}

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        shape = self.model.shape
        for number, probe in self.probes.items():
            assert probe.environment is not None, "what makes it a probe"
            yield from without_place(number, probe, probe.environment)
            if shape is not None and (probe.max_tokens or 0) >= shape.context_tokens:
                yield Conflict(
                    f"eval.{number}.max_tokens",
                    f"leaves no room for a prompt in model.shape.context_tokens = {shape.context_tokens}",
                )
        yield from confusable(self.probes)
        for key in () if self.probes else sorted(self.model_fields_set & _OF_PROBES):
            yield Conflict(key, "is of probes, which sample, and no [[eval]] names an environment; leave it out")

    @model_serializer(mode="wrap")
    def _only_what_applies(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = written(self)
        return {key: value for key, value in found.items() if self.probes or key not in _OF_PROBES}
