"""`nmoe runs attempt`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import ResearchLog


def attempt(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME [--section.key=value]",
            help="A short description, such as higher-lr, and the values that the attempt replaces those of the file by.",
            show_default=False,
        ),
    ],
    config: Annotated[Path, typer.Option(metavar="CONFIG", help="The attempt's TOML file, in this repository.")],
    hypothesis: Annotated[str, typer.Option(metavar="TEXT", help="What the attempt is to show.")],
    log: ResearchLog = Path("research_log.md"),
) -> None:
    """Begin an attempt: branch, tag and entry of the research log.

    The branch is attempt-XX-NAME and the tag attempt-XX-start. The entry says what has changed in the
    configuration, and in the values that replace its own, since the attempt before. The tree has to
    be clean; nothing but the log is written.

    \b
    Example:
      nmoe runs attempt higher-lr --config grpo.toml --hypothesis "1e-5 learns faster"
    Example, a value of the command line:
      nmoe runs attempt higher-lr --config grpo.toml --hypothesis "faster" --optimizer.learning_rate=1e-5
    """
    from nmoe.config.overrides import joined, malformed
    from nmoe.errors import UserError
    from nmoe.runs.attempts import start_attempt

    arguments = joined(arguments)
    names = [argument for argument in arguments if not argument.startswith("-")]
    overrides = [argument for argument in arguments if argument.startswith("-")]
    if len(names) != 1 or malformed(overrides):
        wrong = ", ".join(malformed(overrides) or names) or "nothing"
        raise UserError(f"an attempt takes one NAME, and overrides such as --section.key=value, not {wrong}")
    for line in start_attempt(names[0], config, hypothesis, log, overrides):
        typer.echo(line)
