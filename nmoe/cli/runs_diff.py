"""`nmoe runs diff`."""

from typing import Annotated

import typer

_HELP = "Runs: a directory, several with commas between them, or a quoted glob."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_HELP)],
) -> None:
    """Show in which keys the configurations of runs differ.

    \b
    Example:
      nmoe runs diff runs/base runs/wide
    """
    from nmoe.runs.comparison import diff_runs

    for line in diff_runs(a, b):
        typer.echo(line)
