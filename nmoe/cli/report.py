"""`nmoe report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]) -> None:
    """Write a run's report and print its path.

    \b
    Example:
      nmoe report runs/speedrun/sort_grpo
    """
    from nmoe.runs.report import write_report

    typer.echo(write_report(run))
