"""`nmoe pretrain`."""

from nmoe.cli.arguments import ConfigAndOverrides, configured, sum_up


def pretrain(arguments: ConfigAndOverrides) -> None:
    """Pretrain a model on documents.

    \b
    Example:
      nmoe pretrain tools_base --run.steps=200 --optimizer.learning_rate=3e-4
    """
    from nmoe.config.commands.supervised import PretrainConfig

    with configured(arguments, PretrainConfig) as config:
        from nmoe.recipes.pretrain import pretrain

        run = pretrain(config)
    sum_up(run, "pretrain")
