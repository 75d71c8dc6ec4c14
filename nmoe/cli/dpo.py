"""`nmoe dpo`."""

from nmoe.cli.arguments import ConfigAndOverrides, configured, sum_up


def dpo(arguments: ConfigAndOverrides) -> None:
    """Train a policy on preference pairs, by DPO or a related loss.

    \b
    Example:
      nmoe dpo dpo --preference.loss=ipo
    """
    from nmoe.config.commands.supervised import DPOConfig

    with configured(arguments, DPOConfig) as config:
        from nmoe.recipes.dpo import dpo

        run = dpo(config)
    sum_up(run, "dpo")
