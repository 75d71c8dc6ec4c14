"""`nmoe config list`."""

import typer


def list_() -> None:
    """List the packaged configurations, with the command that runs each.

    \b
    Example:
      nmoe config list
    """
    from nmoe.config.listing import list_configurations

    for line in list_configurations():
        typer.echo(line)
