"""`nmoe runs list`."""

from pathlib import Path
from typing import Annotated

import typer


def list_(
    directory: Annotated[Path, typer.Argument(metavar="[DIRECTORY]", help="Where the runs are.")] = Path("runs"),
) -> None:
    """List runs: command, steps, start, last reward or loss, status.

    \b
    Example:
      nmoe runs list runs/speedrun
    """
    from nmoe.runs.looks import list_runs

    for line in list_runs(directory):
        typer.echo(line)
