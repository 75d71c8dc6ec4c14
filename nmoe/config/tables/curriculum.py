"""[rubric] and [curriculum] of an environment: what a good answer earns, and in which order it is learned."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section, duplicates

GateMetric = Literal["format_ok", "structure_ok", "reasoning_ok", "tool_use_ok", "correctness"]
# The order in which capabilities build on one another; the rates of reasoning and tool use count samples in good form alone.
_CAPABILITIES: tuple[GateMetric, ...] = ("structure_ok", "format_ok", "reasoning_ok", "tool_use_ok", "correctness")


class Weights(Section):
    """The weight of each component of a grade in the reward; a component lies between 0 and 1."""

    format: float = Field(default=0.0, ge=0, description="the completion has the environment's format")
    structure: float = Field(
        default=0.0,
        ge=0,
        description="share of the format that is in place, also where the answer is malformed, for a policy that has not learned "
        "the format yet",
    )
    reasoning: float = Field(default=0.0, ge=0, description="the reasoning is well formed and not empty")
    tool_use: float = Field(
        default=0.0, ge=0, description="a tool was called and returned, and the trajectory ends well formed"
    )
    correctness: float = Field(default=0.0, ge=0, description="the answer is the gold answer")
    efficiency: float = Field(default=0.0, ge=0, description="a correct answer used few tokens and calls")

    @property
    def all_zero(self) -> bool:
        return not any(self.model_dump().values())


class Rubric(Weights):
    """The weights of an environment without a curriculum; by default only correctness counts."""

    correctness: float = Field(default=1.0, ge=0, description="the answer is the gold answer")


class GateSettings(Section):
    """What opens the next stage: `{metric = "format_ok", at_least = 0.9}`."""

    metric: GateMetric = Field(description="the rate that is averaged over the curriculum's window")
    at_least: float = Field(gt=0, le=1, description="the rate at which the next stage opens")
    close_below: float | None = Field(
        default=None, gt=0, lt=1, description="the rate below which the stage closes again; without it, never"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.close_below is not None and self.close_below >= self.at_least:
            yield Conflict("close_below", f"must be below at_least = {self.at_least}, or stages would flicker")


GivenStart = Literal["", "<|channel|>", "<|channel|>final", "<|channel|>final<|message|>"]


class StageSettings(Section):
    """One stage of a curriculum. The last stage has no gate: nothing comes after it."""

    name: str = Field(min_length=1, description="name of the stage in logs, unique in the curriculum")
    weights: Weights = Field(description="the weights in force during the stage; those not named are 0")
    given: GivenStart = Field(
        default="",
        description="the start of Harmony's answer that training gives in this stage, and does not learn: the policy goes on from "
        "there; each stage gives a beginning of what the stage before gave, the last one nothing",
    )
    gate: GateSettings | None = Field(default=None, description="what opens the next stage")


class CurriculumSettings(Section):
    """Stages that open one after the other, so that a skill is rewarded only after the skills that it builds on."""

    window_steps: int = Field(default=4, ge=1, description="number of steps that a gate's rate is averaged over")
    order: Literal["leading", "strict", "any"] = Field(
        default="leading",
        description="what is required: leading: gates in the order of capabilities, correctness not the largest weight before a "
        "gate on the format, no weight on efficiency before one on correctness; strict: no weight on correctness either; "
        "any: nothing",
    )
    stages: Array[StageSettings] = Field(description="the stages in order, as [[curriculum.stages]]")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.order != "any" and len(self.stages) > 1:
            yield from self._out_of_order()
        if not self.stages:
            yield Conflict("stages", "a curriculum needs at least one [[curriculum.stages]]")
        yield from duplicates("stages", (stage.name for stage in self.stages))
        for index, (earlier, later) in enumerate(pairwise(self.stages), 1):
            if not earlier.given.startswith(later.given):
                yield Conflict(
                    f"stages.{index}.given",
                    f"must be a beginning of what the stage before gives, {earlier.given!r}: the start of the answer is taken away "
                    "piece by piece",
                )
        if self.stages and self.stages[-1].given:
            yield Conflict(
                f"stages.{len(self.stages) - 1}.given",
                "must be left out of the last stage, or the policy never learns to begin an answer",
            )
        last = len(self.stages) - 1
        for index, stage in enumerate(self.stages):
            if index < last and stage.gate is None:
                yield Conflict(f"stages.{index}.gate", "is required, or the stages after this one never open")
            if index == last and stage.gate is not None:
                yield Conflict(f"stages.{index}.gate", "must be left out: no stage follows the last one")

    def _out_of_order(self) -> Iterator[Conflict]:
        """Stages that reward a capability before those that it builds on."""
        passed: list[int] = []  # the places in _CAPABILITIES of the gates before a stage
        for index, stage in enumerate(self.stages):
            weights, key = stage.weights, f"stages.{index}.weights"
            formed = any(_CAPABILITIES[place] != "structure_ok" for place in passed)
            others = max(value for name, value in weights.model_dump().items() if name != "correctness")
            least = 0.0 if self.order == "strict" else others
            if not formed and weights.correctness > least:
                yield Conflict(
                    key,
                    "correctness is scored before the format is consistent: begin with a stage whose gate is format_ok, which a "
                    'model that has the format passes in window_steps steps, or set order = "any"',
                )
            if weights.efficiency and len(_CAPABILITIES) - 1 not in passed:
                yield Conflict(
                    key,
                    "efficiency is rewarded before correctness: put a stage whose gate is correctness before it, or set "
                    'order = "any"',
                )
            if stage.gate is None:
                continue
            place = _CAPABILITIES.index(stage.gate.metric)
            if passed and place < passed[-1]:
                yield Conflict(
                    f"stages.{index}.gate.metric",
                    f"{stage.gate.metric} is the capability before {_CAPABILITIES[passed[-1]]}, whose gate stands above: they are "
                    'learned in the order format, reasoning, tool use, correctness, efficiency; or set order = "any"',
                )
            passed.append(place)
