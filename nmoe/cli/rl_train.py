"""`nmoe rl train`."""

from nmoe.cli.arguments import ConfigAndOverrides, configured, sum_up


def train(arguments: ConfigAndOverrides) -> None:
    """Post-train a model on the problems of an environment.

    The default is GRPO; [algorithm] in the configuration chooses among its variants, PPO and distillation.

    \b
    Example:
      nmoe rl train sort_grpo --run.name=wide --batch.group_size=16
    Example, resuming after an interruption:
      nmoe rl train sort_grpo --run.name=wide --batch.group_size=16 --run.resume=true
    """
    from nmoe.config.commands.rl import RLConfig

    with configured(arguments, RLConfig) as config:
        from nmoe.rl.train import train

        run = train(config)
    sum_up(run, "rl")
