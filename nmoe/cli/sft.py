"""`nmoe sft`."""

from nmoe.cli.arguments import ConfigAndOverrides, configured, sum_up


def sft(arguments: ConfigAndOverrides) -> None:
    """Fine-tune a model on conversations or completions.

    In conversations, what the assistant says is trained on; in prompts with completions, the completions.

    \b
    Example:
      nmoe sft sft --records.path=train.jsonl --records.epochs=3
    """
    from nmoe.config.commands.supervised import SFTConfig

    with configured(arguments, SFTConfig) as config:
        from nmoe.recipes.sft import sft

        run = sft(config)
    sum_up(run, "sft")
