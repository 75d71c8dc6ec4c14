"""What the configurations of all training commands share, and how one is loaded.

Relative paths start from the directory that the command runs in, except those that name an environment's file, which start
from the file they stand in, as do the paths in that file.
"""

from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section
from nmoe.config.tables.batch import MicroBatchSection
from nmoe.config.tables.evaluation import PeriodSection, only_one
from nmoe.config.tables.model import LoraSection, ModelSection
from nmoe.config.tables.monitor import WatchSection
from nmoe.config.tables.optimizer import OptimizerSection
from nmoe.config.tables.parallel import ParallelSection
from nmoe.config.tables.run import CheckpointSection, RunSection
from nmoe.config.tables.sinks import SinksSection


class RunConfig(Section):
    """What every run has. Each command has a schema of its own, which adds the tables that it reads: any other is refused."""

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
    def evaluate_every(self) -> int:
        """Steps between evaluations; 0: none."""
        return self.eval[0].every_steps if self.eval else 0

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        yield from only_one(len(self.eval), "the held-out examples are one set, evaluated in one way")
