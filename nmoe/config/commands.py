"""Which schema each command's configuration has."""

from nmoe.config.run import DPOConfig, PretrainConfig, RewardConfig, RLConfig, RunConfig, SFTConfig, VerifierConfig
from nmoe.config.selfplay import SelfplayConfig

COMMANDS: dict[str, type[RunConfig]] = {
    "pretrain": PretrainConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward": RewardConfig,
    "verifier": VerifierConfig,
    "rl train": RLConfig,
    "selfplay": SelfplayConfig,
}
