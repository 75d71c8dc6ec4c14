"""`nmoe reward`."""

from nmoe.cli.arguments import ConfigAndOverrides, configuration, sum_up


def reward(arguments: ConfigAndOverrides) -> None:
    """Train a reward model on preference pairs.

    \b
    Example:
      nmoe reward reward --records.path=pairs.jsonl
    """
    from nmoe.config.commands.supervised import RewardConfig

    config = configuration(arguments, RewardConfig)
    from nmoe.recipes.reward_model import train_reward_model

    sum_up(train_reward_model(config), "reward")
