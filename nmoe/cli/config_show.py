"""`nmoe config show`."""

from typing import Annotated

import typer


def show(name: Annotated[str, typer.Argument(help="One of `nmoe config list`.")]) -> None:
    """Print a packaged configuration, to be changed and run as your own.

    \b
    Example:
      nmoe config show sort_grpo > mine.toml
      nmoe rl train mine.toml
    """
    from nmoe.config.listing import show_configuration

    typer.echo(show_configuration(name), nl=False)
