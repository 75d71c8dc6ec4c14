"""`nmoe runs show`."""

from pathlib import Path
from typing import Annotated

import typer


def show(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]) -> None:
    """Show a run: what was configured, provenance, evaluations, alerts.

    \b
    Example:
      nmoe runs show runs/speedrun/sort_grpo
    """
    from nmoe.runs.looks import show_run

    for line in show_run(run):
        typer.echo(line)
