"""`nmoe reward`."""

from nmoe.cli.arguments import ConfigAndOverrides, configured, sum_up


def reward(arguments: ConfigAndOverrides) -> None:
    """Train a reward model on preference pairs.

    \b
    Example:
      nmoe reward reward --records.path=pairs.jsonl
    """
    from nmoe.config.commands.supervised import RewardConfig

    with configured(arguments, RewardConfig) as config:
        from nmoe.recipes.reward_model import train_reward_model

        run = train_reward_model(config)
    sum_up(run, "reward")
