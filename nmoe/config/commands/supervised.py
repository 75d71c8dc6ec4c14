"""The configurations of the commands that learn from given examples: pretrain, sft, dpo, reward and verifier."""

from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import Array, Conflict
from nmoe.config.commands.base import ProbedConfig, SupervisedConfig
from nmoe.config.tables.evaluation import CountedEvalSection, HeldOutEvalSection
from nmoe.config.tables.optimizer import FineTuningOptimizerSection, PretrainingOptimizerSection
from nmoe.config.tables.recipes import PreferenceSection, RewardModelSection, VerifierSection
from nmoe.config.tables.records import DataSection, RecordsSection, SFTRecordsSection
from nmoe.config.tables.run import RecordsRunSection


class PretrainConfig(ProbedConfig):
    """A run of `nmoe pretrain`: [data] is required."""

    data: DataSection = Field(description="text to pretrain on")
    optimizer: PretrainingOptimizerSection = Field(
        default=PretrainingOptimizerSection(), description="optimizer and schedule"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.evaluate_every and self.data.held_out_documents == 0:
            yield Conflict(
                f"eval.{self.held_out_tables[0]}.every_steps", "nothing to evaluate on; set data.held_out_documents"
            )


class RecordsConfig(SupervisedConfig):
    """A run that learns from [records], for run.steps or for records.epochs."""

    run: RecordsRunSection = Field(default=RecordsRunSection(), description="name, length, seed")
    records: RecordsSection = Field(description="examples to learn from")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        epochs = self.records.epochs
        if self.run.steps == 0 and epochs is None:
            yield Conflict("run.steps", "must be more than 0, unless records.epochs is given")
        if self.run.steps > 0 and epochs is not None:
            yield Conflict("run.steps", f"excludes records.epochs = {epochs:g}; give one of the two")
        if self.evaluate_every and not self.records.holds_out:
            yield Conflict(
                f"eval.{self.held_out_tables[0]}.every_steps",
                "nothing to evaluate on; set records.held_out, held_out_path or held_out_split",
            )
        if self.records.holds_out and not self.evaluate_every:
            yield Conflict("eval", "records are held out but never evaluated on; add [[eval]] with every_steps")


class SFTConfig(ProbedConfig, RecordsConfig):
    """A run of `nmoe sft`."""

    # Said again, since of two bases with a [run] the first counts.
    run: RecordsRunSection = Field(default=RecordsRunSection(), description="name, length, seed")
    records: SFTRecordsSection = Field(description="examples to learn from")
    optimizer: FineTuningOptimizerSection = Field(
        default=FineTuningOptimizerSection(), description="optimizer and schedule"
    )


class PreferenceConfig(RecordsConfig):
    """A run that learns from preference pairs."""

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.records.kind not in (None, "preference"):
            yield Conflict("records.kind", 'must be "preference" or left out')


class DPOConfig(ProbedConfig, PreferenceConfig):
    """A run of `nmoe dpo`."""

    # Said again, since of two bases with a [run] the first counts.
    run: RecordsRunSection = Field(default=RecordsRunSection(), description="name, length, seed")
    preference: PreferenceSection = Field(default=PreferenceSection(), description="the loss of preference pairs")


class RewardConfig(PreferenceConfig):
    """A run of `nmoe reward`."""

    reward_model: RewardModelSection = Field(default=RewardModelSection(), description="the loss of a reward model")
    eval: Array[HeldOutEvalSection] = Field(default=(), description="evaluation during the run, as [[eval]]")
    optimizer: FineTuningOptimizerSection = Field(
        default=FineTuningOptimizerSection(), description="optimizer and schedule"
    )


class VerifierConfig(SupervisedConfig):
    """A run of `nmoe verifier`: [verifier] is required, and has defaults for all of its keys."""

    verifier: VerifierSection = Field(
        default=VerifierSection(), description="labelled steps that a verifier learns from"
    )
    eval: Array[CountedEvalSection] = Field(default=(), description="evaluation during the run, as [[eval]]")
    optimizer: FineTuningOptimizerSection = Field(
        default=FineTuningOptimizerSection(), description="optimizer and schedule"
    )
