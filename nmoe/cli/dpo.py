"""`nmoe dpo`."""

from nmoe.cli.arguments import ConfigAndOverrides, configuration, sum_up


def dpo(arguments: ConfigAndOverrides) -> None:
    """Train a policy on preference pairs, by DPO or a related loss.

    \b
    Example:
      nmoe dpo dpo --preference.loss=ipo
    """
    from nmoe.config.commands.supervised import DPOConfig

    config = configuration(arguments, DPOConfig)
    from nmoe.recipes.dpo import dpo

    sum_up(dpo(config), "dpo")
