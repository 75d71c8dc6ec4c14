"""[eval]: when a run evaluates, and on what."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nmoe.config.base import Conflict, FromFile, Section
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.packaged import find_environment


class PeriodSection(Section):
    """[eval] of what learns from given examples, some of which are held out."""

    every_steps: int = Field(default=0, ge=0, description="steps between evaluations; 0: none during the run")


class CountedEvalSection(PeriodSection):
    """[eval] of a verifier."""

    problems: int = Field(default=200, gt=0, description="held-out problems of one evaluation")


class EvalSection(CountedEvalSection):
    """[eval]: evaluation during the run."""

    environment: Annotated[EnvironmentSettings | None, FromFile(find_environment)] = Field(
        default=None, description="held-out environment, or its `path`; default: a split of the training environment"
    )
    split: Literal["validation", "eval"] = Field(
        default="eval",
        description="the training environment's split to evaluate on; what decides when a run ends is not what it is judged by",
    )
    temperature: float = Field(default=0.0, ge=0, description="0: greedy; otherwise one sample at this temperature")
    enough: float | None = Field(
        default=None, gt=0, le=1, description="the run ends when every source of problems is solved at this rate"
    )
    patience: int | None = Field(
        default=None, gt=0, description="the run ends after so many evaluations in a row in which no source got better"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        for key in ("enough", "patience"):
            if getattr(self, key) is not None and self.every_steps == 0:
                yield Conflict(key, "looks at evaluations, of which there are none during the run; set every_steps")
        if self.environment is not None and self.split != "eval":
            yield Conflict("split", "is of the training environment, and eval.environment names another")


class SelfplayEvalSection(Section):
    """[eval] of self-play, which evaluates before the first round and after each that trains."""

    problems: int = Field(default=200, gt=0, description="held-out problems of one evaluation")
    environment: Annotated[EnvironmentSettings | None, FromFile(find_environment)] = Field(
        default=None, description="what the verifier is asked, or its `path`; without it nothing is evaluated"
    )
