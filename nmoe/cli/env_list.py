"""`nmoe env list`."""

import typer


def list_() -> None:
    """List the named environments: those of nmoe and of installed packages.

    \b
    Example:
      nmoe env list
    """
    from nmoe.config.listing import list_environments

    for line in list_environments():
        typer.echo(line)
