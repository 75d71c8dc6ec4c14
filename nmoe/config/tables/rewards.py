"""The settings of `[[rewards]]`: the rewards of an environment in addition to its rubric."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field

from nmoe.config.base import Conflict, DataPath, NameIn, Section
from nmoe.config.registry import REWARDS

# The components of a grade that the rubric weighs (`nmoe.envs.grade`).
RUBRIC_COMPONENTS = ("format", "structure", "reasoning", "tool_use", "correctness", "efficiency")

PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")

_NAME = re.compile(r"\w[\w.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RewardKeys(Section):
    """What every reward has."""

    name: str = Field(
        min_length=1, description="name of the component in metrics and samples, unique among all components"
    )
    weight: float = Field(default=1.0, description="weight of its values in the reward; negative for a penalty")
    only_if_correct: bool = Field(
        default=False, description="only right answers are asked about; others get 0. For scores of quality"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.only_if_correct and self.weight < 0:
            yield Conflict("only_if_correct", "a penalty for right answers alone makes wrong ones better; drop it")
        if not _NAME.fullmatch(self.name):
            yield Conflict("name", "is letters, digits and . _ -, the first a letter or digit")
        elif self.name in RUBRIC_COMPONENTS:
            yield Conflict("name", "is a component of the rubric; take another name")


class FunctionRewardConfig(RewardKeys):
    """A function of your own: `f(prompts, completions, **columns) -> list[float | None]`, plain or async."""

    type: Literal["function"]
    call: Annotated[str, NameIn(REWARDS)] = Field(description="the function, as `package.module:function`")
    timeout_s: float = Field(default=60.0, gt=0, description="seconds that one call, over one group, may take")
    replay: bool = Field(
        default=True,
        description="a replay calls it again, with its one sample alone; false where it compares a group's samples or draws at "
        "random: the value is then taken as recorded",
    )


class ServiceKeys(RewardKeys):
    """The keys of a reward that asks a service. No other part of nmoe uses the network during training."""

    url: str = Field(description="URL that requests are posted to, such as http://localhost:8000/v1/chat/completions")
    token_env: str | None = Field(
        default=None,
        description="environment variable with the bearer token; the token itself is never stored",
    )
    timeout_s: float = Field(default=60.0, gt=0, description="seconds per attempt")
    retries: int = Field(default=3, ge=0, description="retries after a failed attempt, with growing waits between them")
    concurrency: int = Field(default=8, ge=1, description="maximum concurrent requests")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
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
        if self.token_env is not None and not _VARIABLE.fullmatch(self.token_env):
            yield Conflict("token_env", "must be the name of an environment variable, not the token")


class HttpRewardConfig(ServiceKeys):
    """A service: {"prompts", "completions", "columns"} are posted, {"rewards": [...]} comes back."""

    type: Literal["http"]


class JudgeRewardConfig(ServiceKeys):
    """A language model behind an OpenAI-compatible chat endpoint, asked about every sample at temperature 0."""

    type: Literal["judge"]
    model: str = Field(min_length=1, description="the model's name at the endpoint")
    template: str | None = Field(
        default=None,
        description="the judge's prompt; placeholders: {{prompt}}, {{completion}}, {{reasoning}}, {{fence}} and columns such as "
        "{{gold}}",
    )
    template_file: Annotated[str | None, DataPath()] = Field(
        default=None, min_length=1, description="a text file with the template"
    )
    system: str = Field(default="", description="the judge's system message; empty: none")
    score: str = Field(
        default=r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)",
        description="regular expression whose group is the score in the judge's answer; the last match counts",
    )
    scale: Annotated[tuple[float, float], Field(strict=False)] = Field(
        default=(0.0, 10.0), description="[worst, best] score, which become 0 and 1"
    )
    max_tokens: int = Field(default=1024, ge=1, description="maximum tokens per judgement")
    extra_body: dict[str, Any] = Field(default={}, description="additional keys of the request, such as `{seed = 1}`")
    cache: str | None = Field(
        default=None,
        min_length=1,
        description="directory of cached judgements, relative to the working directory; default: no cache",
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
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
    """A verifier that `nmoe verifier` trained: the probability that every step of the answer is right, or the score it expects."""

    type: Literal["verifier"]
    path: str = Field(min_length=1, description="run or checkpoint of the verifier, from the working directory")
    steps: bool = Field(
        default=False,
        description="also reward every step by the probability that it is right (algorithm.step_reward_coef); "
        "with `weight = 0` only the steps are rewarded",
    )


class RewardModelRewardConfig(RewardKeys):
    """A reward model that `nmoe reward` trained: the number that it gives the answer."""

    type: Literal["reward_model"]
    path: str = Field(min_length=1, description="run or checkpoint of the reward model, from the working directory")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.only_if_correct:
            yield Conflict(
                "only_if_correct",
                "a reward model's scale has no zero, so wrong answers at 0 could be the best; use a judge or a function",
            )


def _unusable(parts: SplitResult) -> str | None:
    """Why no connection can be made to the host and port of a URL; None if one may be."""
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
    """The placeholders of a template."""
    return set(PLACEHOLDER.findall(template))


RewardConfig = Annotated[
    FunctionRewardConfig | HttpRewardConfig | JudgeRewardConfig | VerifierRewardConfig | RewardModelRewardConfig,
    Field(discriminator="type"),
]
