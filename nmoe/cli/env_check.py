"""`nmoe env check`."""

from pathlib import Path
from typing import Annotated

import typer


def check(
    environment: Annotated[
        str,
        typer.Argument(
            metavar="ENVIRONMENT", help="A TOML file, a directory with environment.toml, or a packaged name."
        ),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR_OR_RUN", help="Whose tokenizer to render with; default: a byte tokenizer."),
    ] = None,
) -> None:
    """Check an environment: settings, local data, a prompt, two grades.

    A prompt is rendered, and a right and a wrong answer are graded. Of your own code only tasks and pools are
    imported, and the network is not used.

    \b
    Example:
      nmoe env check skills
    Example, with the tokens of a trained model:
      nmoe env check my_environment --tokenizer runs/speedrun
    """
    from nmoe.envs.check import check_environment

    for line in check_environment(Path(environment), tokenizer):
        typer.echo(line)
