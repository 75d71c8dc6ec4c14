"""The rewards of an environment: [rubric], [curriculum] and [[rewards]]."""

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field

from nmoe.config.base import VARIABLE, Array, Conflict, DataPath, NameIn, Section, duplicates
from nmoe.config.registry import REWARDS

GateMetric = Literal["format_ok", "structure_ok", "reasoning_ok", "tool_use_ok", "correctness"]
# The order in which capabilities build on one another; the rates of reasoning and tool use count samples in good form alone.
_CAPABILITIES: tuple[GateMetric, ...] = ("structure_ok", "format_ok", "reasoning_ok", "tool_use_ok", "correctness")


class Weights(Section):
    """The weight of each component in the reward; each component of a grade lies between 0 and 1."""

    format: float = Field(default=0.0, ge=0)
    """the completion has the environment's format"""
    structure: float = Field(default=0.0, ge=0)
    """share of the format that the completion gets right, even if it is malformed, for a policy that has not learned the format
    yet"""
    reasoning: float = Field(default=0.0, ge=0)
    """the reasoning is well formed and not empty"""
    tool_use: float = Field(default=0.0, ge=0)
    """a tool call succeeded, and the trajectory ends well formed"""
    correctness: float = Field(default=0.0, ge=0)
    """the answer is the gold answer"""
    efficiency: float = Field(default=0.0, ge=0)
    """the answer is correct, and used few tokens and tool calls; a run compares it within the group's correct samples"""

    @property
    def all_zero(self) -> bool:
        return not any(self.model_dump().values())


class Rubric(Weights):
    """The weights of an environment without a curriculum; by default only correctness counts."""

    correctness: float = Field(default=1.0, ge=0)


class GateSettings(Section):
    """The condition that opens the next stage of a curriculum: `{metric = "format_ok", at_least = 0.9}`."""

    metric: GateMetric
    """the rate that is compared, averaged over the curriculum's window"""
    at_least: float = Field(gt=0, le=1)
    """the rate at which the next stage opens"""
    close_below: float | None = Field(default=None, gt=0, lt=1)
    """the rate below which the curriculum returns to this stage; default: never"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.close_below is not None and self.close_below >= self.at_least:
            yield Conflict("close_below", f"must be below at_least = {self.at_least}, or stages would flicker")


GivenStart = Literal["", "<|channel|>", "<|channel|>final", "<|channel|>final<|message|>"]


class StageSettings(Section):
    """One stage of a curriculum. The last stage has no gate."""

    name: str = Field(min_length=1)
    """name of the stage in logs, unique in the curriculum"""
    weights: Weights
    """the weights in force during the stage; those not named are 0"""
    given: GivenStart = ""
    """the beginning of Harmony's answer that this stage gives the policy, which continues it and is not trained on it; each
    stage gives a shorter beginning than the stage before, the last one nothing"""
    gate: GateSettings | None = None
    """the condition that opens the next stage"""


class CurriculumSettings(Section):
    """[curriculum]: stages that open one after another, so that a skill is rewarded only after the skills that it builds on."""

    window_steps: int = Field(default=4, ge=1)
    """number of steps that a gate's rate is averaged over"""
    order: Literal["strict", "any"] = "strict"
    """which stages are allowed. strict: gates follow the order of capabilities, correctness has no weight before a gate on the
    format, and efficiency none before a gate on correctness; any: all"""
    stages: Array[StageSettings]
    """the stages in order, as [[curriculum.stages]]"""

    def conflicts(self) -> Iterator[Conflict]:
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
        """Yields a conflict for each stage that rewards a capability before the capabilities that it builds on."""
        passed: list[int] = []  # the indices in _CAPABILITIES of the gates before a stage
        for index, stage in enumerate(self.stages):
            weights, key = stage.weights, f"stages.{index}.weights"
            formed = any(_CAPABILITIES[level] != "structure_ok" for level in passed)
            if weights.correctness and not formed:
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
            level = _CAPABILITIES.index(stage.gate.metric)
            if passed and level < passed[-1]:
                yield Conflict(
                    f"stages.{index}.gate.metric",
                    f"{stage.gate.metric} is the capability before {_CAPABILITIES[passed[-1]]}, whose gate stands above: they are "
                    'learned in the order format, reasoning, tool use, correctness, efficiency; or set order = "any"',
                )
            passed.append(level)


# The components of a grade that the rubric weighs (`nmoe.envs.grade`).
RUBRIC_COMPONENTS = ("format", "structure", "reasoning", "tool_use", "correctness", "efficiency")

PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")

_NAME = re.compile(r"\w[\w.-]*")


class RewardKeys(Section):
    """The keys of every reward."""

    name: str = Field(min_length=1)
    """name of the component in metrics and samples, unique among all components"""
    weight: float = 1.0
    """weight of this component in the reward; negative for a penalty"""
    only_if_correct: bool = False
    """compute this reward only for right answers, and give 0 to others; for scores of quality"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.only_if_correct and self.weight < 0:
            yield Conflict("only_if_correct", "a penalty for right answers alone makes wrong ones better; drop it")
        if not _NAME.fullmatch(self.name):
            yield Conflict("name", "is letters, digits and . _ -, the first a letter or digit")
        elif self.name in RUBRIC_COMPONENTS:
            yield Conflict("name", "is a component of the rubric; take another name")


class FunctionRewardConfig(RewardKeys):
    """A function of your own: `f(prompts, completions, **columns) -> list[float | None]`, plain or async."""

    type: Literal["function"]
    call: Annotated[str, NameIn(REWARDS)]
    """the function, as `package.module:function`"""
    timeout_s: float = Field(default=60.0, gt=0)
    """maximum seconds of one call, which gets one group"""
    replay: bool = True
    """call the function again when a sample is replayed, with this sample only; set false if it compares the samples of a group
    or draws at random: a replay then takes the recorded value"""


class ServiceKeys(RewardKeys):
    """The keys of a reward computed by an HTTP service. Nothing else in nmoe uses the network during training."""

    url: str
    """URL that requests are posted to, such as http://localhost:8000/v1/chat/completions"""
    token_env: str | None = None
    """environment variable with the bearer token; the token itself is never stored"""
    timeout_s: float = Field(default=60.0, gt=0)
    """seconds per attempt"""
    retries: int = Field(default=3, ge=0)
    """retries after a failed attempt, with growing waits between them"""
    concurrency: int = Field(default=8, ge=1)
    """maximum concurrent requests"""

    def conflicts(self) -> Iterator[Conflict]:
        parts = None
        with suppress(ValueError):
            parts = urlsplit(self.url)
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            yield Conflict("url", "must be a URL that begins with http:// or https:// and names a host")
        elif (unusable := _unusable(parts)) is not None:
            yield Conflict("url", unusable)
        elif parts.username is not None or parts.password is not None:
            yield Conflict(
                "url", "contains a user or password, which would be written to the run's config.toml; use token_env"
            )
        if self.token_env is not None and not VARIABLE.fullmatch(self.token_env):
            yield Conflict("token_env", "must be the name of an environment variable, not the token")


class HttpRewardConfig(ServiceKeys):
    """An HTTP service that computes rewards: it gets {"prompts", "completions", "columns"} by POST and returns {"rewards":
    [...]}."""

    type: Literal["http"]


class JudgeRewardConfig(ServiceKeys):
    """A language model as a judge behind an OpenAI-compatible chat endpoint, which scores every sample at temperature 0."""

    type: Literal["judge"]
    model: str = Field(min_length=1)
    """the model's name at the endpoint"""
    template: str | None = None
    """the judge's prompt; placeholders: {{prompt}}, {{completion}}, {{reasoning}}, {{fence}} and columns such as {{gold}}"""
    template_file: Annotated[str | None, DataPath()] = Field(default=None, min_length=1)
    """a text file with the template"""
    system: str = ""
    """the judge's system message; empty: none"""
    score: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
    """regular expression whose group is the score in the judge's answer; the last match counts"""
    scale: Annotated[tuple[float, float], Field(strict=False)] = (0.0, 10.0)
    """[worst, best] score of the judge, rescaled to 0 and 1"""
    max_tokens: int = Field(default=1024, ge=1)
    """maximum tokens per judgement"""
    extra_body: dict[str, Any] = Field(default={})
    """additional keys of the request, such as `{seed = 1}`"""
    cache: str | None = Field(default=None, min_length=1)
    """directory of cached judgements, relative to the working directory; default: no cache"""

    def conflicts(self) -> Iterator[Conflict]:
        if (self.template is None) == (self.template_file is None):
            yield Conflict("", "needs either template or template_file")
        if self.template is not None and not names_in(self.template) & {"completion", "reasoning"}:
            yield Conflict("template", "does not contain {{completion}}")
        try:
            groups = re.compile(self.score).groups
        except re.error as error:
            yield Conflict("score", f"is not a regular expression: {error}")
        else:
            if groups != 1:
                yield Conflict("score", f"has {groups} groups; one group is the score, the others are written (?:...)")
        if self.scale[0] == self.scale[1]:
            yield Conflict("scale", "must be [worst, best], two different scores")
        if kept := self.extra_body.keys() & {"model", "messages", "n", "stream"}:
            yield Conflict("extra_body", f"must not have {', '.join(sorted(kept))}")


class VerifierRewardConfig(RewardKeys):
    """A verifier trained by `nmoe verifier`: the reward is the probability that every step of the answer is right, or the
    expected score."""

    type: Literal["verifier"]
    path: str = Field(min_length=1)
    """run or checkpoint of the verifier, relative to the working directory"""
    steps: bool = False
    """also reward every step by the probability that it is right (algorithm.step_reward_coef); with `weight = 0`, only the steps
    are rewarded"""


class RewardModelRewardConfig(RewardKeys):
    """A reward model trained by `nmoe reward`: the reward is its scalar output for the answer."""

    type: Literal["reward_model"]
    path: str = Field(min_length=1)
    """run or checkpoint of the reward model, relative to the working directory"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.only_if_correct:
            yield Conflict(
                "only_if_correct",
                "a reward model's scale has no zero, so wrong answers at 0 could be the best; use a judge or a function",
            )


def _unusable(parts: SplitResult) -> str | None:
    """Returns the reason why no connection to the host and port of a URL is possible; None if they are valid."""
    try:
        if parts.port == 0:
            return "names port 0; a port is 1 to 65535"
    except ValueError:
        return "names no valid port; a port is 1 to 65535"
    try:
        (parts.hostname or "").encode("idna")
    except UnicodeError:
        return f"names no valid host: each part of {parts.hostname!r} between two dots has 1 to 63 characters"
    return None


def names_in(template: str) -> set[str]:
    """Returns the names of the placeholders in a judge's template, such as `prompt` for {{prompt}}."""
    return set(PLACEHOLDER.findall(template))


RewardConfig = Annotated[
    FunctionRewardConfig | HttpRewardConfig | JudgeRewardConfig | VerifierRewardConfig | RewardModelRewardConfig,
    Field(discriminator="type"),
]
