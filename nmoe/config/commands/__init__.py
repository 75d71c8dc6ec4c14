"""Which schema each command's configuration has."""

from nmoe.config.commands.base import RunConfig, load_run
from nmoe.config.commands.rl import RLConfig
from nmoe.config.commands.selfplay import SelfplayConfig
from nmoe.config.commands.supervised import DPOConfig, PretrainConfig, RewardConfig, SFTConfig, VerifierConfig

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
