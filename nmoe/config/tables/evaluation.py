"""[eval]: when a run evaluates, and on what."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nmoe.config.base import Conflict, FromFile, Section
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.modes import mode_of
from nmoe.config.packaged import find_environment
from nmoe.errors import UserError


class PeriodSection(Section):
    """[eval] of a command that learns from examples, some of which are held out."""

    every_steps: int = Field(default=0, ge=0, description="steps between evaluations; 0: none during the run")


class CountedEvalSection(PeriodSection):
    """[eval] of a verifier."""

    problems: int = Field(default=200, gt=0, description="held-out problems per evaluation")


class ProbeOutsideSection(CountedEvalSection):
    """[eval.ood]: a second probe, out of the training distribution, with its own period. It decides which checkpoint is best."""

    every_steps: int = Field(default=20, gt=0, description="steps between evaluations")
    environment: Annotated[EnvironmentSettings, FromFile(find_environment)] = Field(
        description="an environment of other problems than training's, or its `path`"
    )
    mode: str = Field(default="greedy_pass@1", description="mode; docs/guides/evaluation.md")
    temperature: float | None = Field(default=None, ge=0, description="default: the mode's")
    drops: int = Field(
        default=2, ge=0, description="end the run when greedy_pass@1 drops this many times in a row; 0: never"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        try:
            name = mode_of(self.mode, None, self.temperature).name
        except UserError as error:
            yield Conflict("mode", str(error))
            return
        if "drops" in self.model_fields_set and self.drops and name != "greedy_pass@1":
            yield Conflict("drops", f"compares greedy_pass@1, and the mode is {name}; set 0")


class EvalSection(CountedEvalSection):
    """[eval]: evaluation during the run, in the training distribution unless `environment` says otherwise."""

    ood: ProbeOutsideSection | None = Field(default=None, description="the probe out of the training distribution")

    environment: Annotated[EnvironmentSettings | None, FromFile(find_environment)] = Field(
        default=None, description="held-out environment, or its `path`; default: a split of the training environment"
    )
    split: Literal["validation", "eval"] = Field(
        default="eval",
        description="the split of the training environment to evaluate on; use `validation` if evaluations end the run",
    )
    temperature: float = Field(default=0.0, ge=0, description="0: greedy; otherwise one sample at this temperature")
    enough: float | None = Field(
        default=None, gt=0, le=1, description="end the run when every source of problems is solved at this rate"
    )
    patience: int | None = Field(
        default=None, gt=0, description="end the run after this many evaluations without an improvement in any source"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        for key in ("enough", "patience"):
            if getattr(self, key) is not None and self.every_steps == 0:
                yield Conflict(key, "needs evaluations during the run; set every_steps")
        if self.environment is not None and self.split != "eval":
            yield Conflict("split", "applies to the training environment, and eval.environment names another")


class SelfplayEvalSection(Section):
    """[eval] of self-play, which evaluates before the first round and after each round with training."""

    problems: int = Field(default=200, gt=0, description="held-out problems per evaluation")
    environment: Annotated[EnvironmentSettings | None, FromFile(find_environment)] = Field(
        default=None,
        description="the environment that the verifier is evaluated on, or its `path`; default: no evaluation",
    )
