"""What an evaluation by command asks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.modes import Mode
from nmoe.errors import UserError
from nmoe.types import ExpertWeightsForm


@dataclass(frozen=True)
class Asked:
    """The mode, how many problems, and the seed. `max_tokens` and `reasoning_effort` replace those of context and environment."""

    mode: Mode
    problems: int
    seed: int
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    device: str = "auto"
    expert_weights: ExpertWeightsForm = "dequantized"


def sampling_record(mode: Mode, max_tokens: int | None, effort: str | None) -> dict[str, Any]:
    """The settings that results are comparable under, as an evaluation keeps them."""
    settings = {"temperature": mode.temperature, "samples": mode.samples}
    return {**settings, "max_tokens": max_tokens, "reasoning_effort": effort}


def effortful(settings: EnvironmentSettings, effort: str | None) -> EnvironmentSettings:
    """The environment with this reasoning effort in place of its own. Raises UserError for a format without a place for it."""
    if effort is None:
        return settings
    if settings.format == "boxed":
        raise UserError(f"{settings.env_id}: plain text has no place for a reasoning effort; drop --reasoning-effort")
    return settings.model_copy(update={"reasoning_effort": effort})
