"""`nmoe pretrain`."""

from nmoe.cli.arguments import ConfigAndOverrides, configuration, sum_up


def pretrain(arguments: ConfigAndOverrides) -> None:
    """Pretrain a model on documents.

    \b
    Example:
      nmoe pretrain tools_base --run.steps=200 --optimizer.learning_rate=3e-4
    """
    from nmoe.config.commands.supervised import PretrainConfig

    config = configuration(arguments, PretrainConfig)
    from nmoe.recipes.pretrain import pretrain

    sum_up(pretrain(config), "pretrain")
