"""The schema of each command's configuration, and how one is loaded."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nmoe.config.commands.base import AdaptableConfig, RunConfig
from nmoe.config.commands.rl import RLConfig
from nmoe.config.commands.selfplay import SelfplayConfig
from nmoe.config.commands.supervised import DPOConfig, PretrainConfig, RewardConfig, SFTConfig, VerifierConfig
from nmoe.config.loader import load, load_with
from nmoe.config.overrides import read_override
from nmoe.config.packaged import find_configuration
from nmoe.config.tables.optimizer import LORA_LEARNING_RATE_FACTOR
from nmoe.parsing import toml_of

__all__ = ["COMMANDS", "RunConfig", "command_for", "load_run"]

COMMANDS: dict[str, type[RunConfig]] = {
    "pretrain": PretrainConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward": RewardConfig,
    "verifier": VerifierConfig,
    "rl train": RLConfig,
    "selfplay": SelfplayConfig,
}


C = TypeVar("C", bound=RunConfig)


def load_run(path: Path, schema: type[C], overrides: Sequence[str] = ()) -> C:
    """Loads a run's configuration: a file, or a packaged name (`Path("sort_grpo")`).

    A run without a name is called after its file; an adapter without a learning rate has ten times the command's default. Raises
    ConfigError with all problems, and UserError for a name that nothing has."""
    path = find_configuration(str(path))
    return _completed(load(path, schema, overrides, COMMANDS), path.stem)


def command_for(path: Path, overrides: Sequence[str] = ()) -> str:
    """The command that a configuration is written for, by its tables: the one that knows most of them and misses fewest of its own,
    the first of `COMMANDS` where several do. Raises UserError for a file that cannot be read."""
    path = find_configuration(str(path))
    try:
        tables = set(toml_of(path.read_text()))
    except (OSError, ValueError):
        tables = set()  # loading it says what is wrong
    tables |= {str(override[0][0]) for text in overrides if (override := read_override(text)) is not None}

    def misfit(command: str) -> int:
        fields = COMMANDS[command].model_fields
        lacking = {name for name, field in fields.items() if field.is_required()} - tables
        return len(tables - fields.keys()) + len(lacking)

    return min(COMMANDS, key=misfit)


def load_run_with(path: Path | None, schema: type[C], tables: Mapping[str, Any], source: str, name: str) -> C:
    """The configuration of a run in a file, if there is one, with `tables` laid over it; otherwise as `load_run`. `source` is what
    messages call the program's tables, and `name` is the run's without a file."""
    path = None if path is None else find_configuration(str(path))
    return _completed(load_with(path, schema, tables, source), name if path is None else path.stem)


def _completed(config: C, stem: str) -> C:
    """Fills in what depends on other keys: the name, and the learning rate of an adapter."""
    if "learning_rate" not in config.optimizer.model_fields_set:
        adapts = isinstance(config, AdaptableConfig) and config.lora is not None
        rate = config.optimizer.learning_rate * (LORA_LEARNING_RATE_FACTOR if adapts else 1)
        optimizer = config.optimizer.model_copy(update={"learning_rate": rate})
        config = config.model_copy(update={"optimizer": optimizer})
    if "name" in config.run.model_fields_set:
        return config
    name = re.sub(r"^\W|[^\w.+=-]", "_", stem)
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
