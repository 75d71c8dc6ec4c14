"""The schema of each command's configuration, and how one is loaded."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from nmoe.config.commands.base import AdaptableConfig, RunConfig
from nmoe.config.commands.rl import RLConfig
from nmoe.config.commands.selfplay import SelfplayConfig
from nmoe.config.commands.supervised import DPOConfig, PretrainConfig, RewardConfig, SFTConfig, VerifierConfig
from nmoe.config.loader import load
from nmoe.config.packaged import find_configuration
from nmoe.config.tables.optimizer import LORA_LEARNING_RATE_FACTOR

__all__ = ["COMMANDS", "RunConfig", "load_run"]

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
    config = load(path, schema, overrides, COMMANDS)
    if "learning_rate" not in config.optimizer.model_fields_set:
        adapts = isinstance(config, AdaptableConfig) and config.lora is not None
        rate = config.optimizer.learning_rate * (LORA_LEARNING_RATE_FACTOR if adapts else 1)
        optimizer = config.optimizer.model_copy(update={"learning_rate": rate})
        config = config.model_copy(update={"optimizer": optimizer})
    if "name" in config.run.model_fields_set:
        return config
    name = re.sub(r"^\W|[^\w.+=-]", "_", path.stem)
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
