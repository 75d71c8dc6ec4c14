"""[[eval]]: when a run evaluates, on which problems, and how. Every table is one probe, with the same problems at each
evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from nmoe.config.base import Conflict, FromFile, Section
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.modes import Mode, mode_of
from nmoe.config.packaged import find_environment
from nmoe.errors import UserError

# The keys of an [[eval]] on the examples held out.
_OF_HELD_OUT = frozenset({"every_steps", "allow_trained_on"})


class PeriodSection(Section):
    """[[eval]] of a command that evaluates on held-out examples."""

    every_steps: int = Field(default=20, gt=0)
    """steps between evaluations; the last step is evaluated, too"""


class CountedEvalSection(PeriodSection):
    """[[eval]] of a verifier, whose held-out problems are removed from its training data."""

    problems: int = Field(default=200, gt=0)
    """held-out problems per evaluation"""


class HeldOutEvalSection(PeriodSection):
    """[[eval]] of a command that learns from examples and evaluates on held-out ones."""

    allow_trained_on: bool = False
    """evaluate even if some held-out problems are also trained on, which is refused otherwise; the results are then marked"""


class ProbeSection(CountedEvalSection, HeldOutEvalSection):
    """[[eval]]: a set of problems that the model answers during the run, with its own period and sampling."""

    role: Literal["in_distribution", "out_of_distribution"] = "in_distribution"
    """the out_of_distribution probe decides which checkpoint is best; without one, the first probe does"""
    environment: Annotated[EnvironmentSettings | None, FromFile(find_environment)] = None
    """held-out environment, or its `path`; default: in RL a split of the training environment, elsewhere the held-out examples"""
    mode: str | None = None
    """mode of evaluation; default: by `samples` and `temperature`, greedy_pass@1 without them (docs/guides/evaluation.md)"""
    samples: int | None = Field(default=None, gt=0)
    """completions per problem; default: the mode's, or 1"""
    temperature: float | None = Field(default=None, ge=0)
    """sampling temperature; default: the mode's, or 0, which is greedy"""
    max_tokens: int | None = Field(default=None, gt=0)
    """maximum tokens per completion; default: sampling.max_new_tokens in RL; required elsewhere"""
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    """reasoning effort in evaluations; default: the environment's"""
    enough: float | None = Field(default=None, gt=0, le=1)
    """end the run when the solve rate of every source of problems reaches this"""
    patience: int | None = Field(default=None, gt=0)
    """end the run after this many evaluations in which no source of problems improved"""
    drops: int | None = Field(default=None, ge=0)
    """end the run after this many evaluations in a row with a greedy_pass@1 significantly below the best earlier one, or below the
    one before the first step; 0: never; default: 2 for out_of_distribution with greedy_pass@1, else 0"""

    @property
    def sampled(self) -> Mode:
        """The mode of evaluation, with its number of samples and temperature."""
        return mode_of(self.mode, self.samples, self.temperature)

    @property
    def fatal_drops(self) -> int:
        """The number of worse evaluations in a row that ends the run; 0: never."""
        if self.drops is not None:
            return self.drops
        return 2 if self.role == "out_of_distribution" and self.sampled.name == "greedy_pass@1" else 0

    def conflicts(self) -> Iterator[Conflict]:
        try:
            name = self.sampled.name
        except UserError as error:
            yield Conflict("temperature" if self.mode is None else "mode", str(error))
            return
        if self.drops and name != "greedy_pass@1":
            yield Conflict("drops", f"compares greedy_pass@1, and the mode is {name}; set 0")


class RLEvalSection(ProbeSection):
    """[[eval]] of RL: a set of problems to evaluate on, from the training environment's held-out split or from another
    environment."""

    split: Literal["validation", "eval"] = "eval"
    """the split of the training environment to evaluate on; use `validation` if evaluations may end the run"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.environment is None and self.role == "out_of_distribution":
            yield Conflict("environment", "is required: problems from outside the training environment")
        if self.environment is None and self.allow_trained_on:
            yield Conflict(
                "allow_trained_on",
                "is for an environment beside the run's: a split of the training environment is held out",
            )
        if self.environment is not None and self.split != "eval":
            yield Conflict("split", "applies to the training environment, and this table names another")


class ExamplesEvalSection(ProbeSection):
    """[[eval]] of a run that learns from given examples: with an environment, samples answers to its problems; without one,
    computes the loss or accuracy on the held-out examples."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.environment is None:
            for key in sorted(self.model_fields_set - {*_OF_HELD_OUT, "environment"}):
                yield Conflict(key, "is of a probe, which samples; name its environment, or leave this out")
        elif self.max_tokens is None:
            yield Conflict("max_tokens", "is required beside an environment: the most tokens of a completion")

    @model_serializer(mode="wrap")
    def _only_its_keys(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out a probe's keys from the output if there is no environment, since they would be refused on reloading."""
        found: dict[str, Any] = written(self)
        kept = found if self.environment is not None else found.keys() & _OF_HELD_OUT
        return {key: found[key] for key in kept}


class SelfplayEvalSection(Section):
    """[[eval]] of self-play, which evaluates before the first round and after each round with training."""

    problems: int = Field(default=200, gt=0)
    """held-out problems per evaluation"""
    environment: Annotated[EnvironmentSettings, FromFile(find_environment)]
    """the environment that the verifier is evaluated on, or its `path`"""


def only_one(held_out: Sequence[int], what: str) -> Iterator[Conflict]:
    """Yields a conflict if more than one [[eval]] table (their indices are in `held_out`) evaluates on the held-out examples,
    which are one set."""
    if len(held_out) > 1:
        yield Conflict(f"eval.{held_out[1]}", f"{what}; leave out all [[eval]] but one")


def confusable(probes: Mapping[int, ProbeSection], training: str = "") -> Iterator[Conflict]:
    """Yields a conflict for each probe whose results would have the same mode and dataset name as an earlier probe's. Probes are
    given by the index of their [[eval]]; `training` is the training environment's env_id."""
    first: dict[tuple[str, str], int] = {}
    for index, probe in probes.items():
        mode, name = probe.sampled, training if probe.environment is None else probe.environment.env_id
        # Samples at a temperature give `sampling_pass@1` besides, however many they are.
        kind = (name, "sampling" if mode.temperature else mode.name)
        if kind in first:
            yield Conflict(
                f"eval.{index}",
                f"its results look like those from [eval[{first[kind]}]]: both are {kind[1]} on {name}; choose "
                "another mode, or give its environment another env_id",
            )
        first.setdefault(kind, index)


def effort_in_plain_text(index: int, probe: ProbeSection, environment: EnvironmentSettings) -> Iterator[Conflict]:
    """Yields a conflict if the [[eval]] table at `index` sets a reasoning effort that its environment's format cannot express."""
    if probe.reasoning_effort is not None and environment.format == "boxed":
        yield Conflict(f"eval.{index}.reasoning_effort", "plain text has no place for it; drop it")
