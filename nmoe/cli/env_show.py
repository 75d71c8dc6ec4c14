"""`nmoe env show`."""

from typing import Annotated

import typer


def show(name: Annotated[str, typer.Argument(help="One of `nmoe env list`.")]) -> None:
    """Print a packaged environment, to be changed and used as your own.

    \b
    Example:
      nmoe env show sort > mine.toml
      nmoe env check mine.toml
    """
    from nmoe.config.listing import show_environment

    typer.echo(show_environment(name), nl=False)
