"""What an evaluation by command asks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.modes import Mode
from nmoe.errors import UserError
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.types import ExpertWeightsForm, Precision


@dataclass(frozen=True)
class Asked:
    """The mode, how many problems, and the seed. `max_tokens` and `reasoning_effort` replace those of context and environment;
    `best_of` is a scorer that chooses among the samples. `allow_trained_on` permits problems that a model was trained on."""

    mode: Mode
    problems: int
    seed: int
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    device: str = "auto"
    expert_weights: ExpertWeightsForm = "dequantized"
    best_of: Path | None = None
    allow_trained_on: bool = False
    precision: Precision | None = None


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


def models_and_benchmarks(named: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Divides `CHECKPOINT... BENCHMARK...`: the first is a model, and so are those behind it that hold one. Raises UserError where
    no benchmark is left."""
    count = 1
    while count < len(named) - 1 and _holds_a_model(named[count]):
        count += 1
    if len(named) < 2:
        raise UserError("eval needs a BENCHMARK behind the checkpoints: a TOML file, a directory or a packaged name")
    return list(named[:count]), list(named[count:])


def _holds_a_model(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        resolve_checkpoint(path)
    except UserError:
        return False
    return True
