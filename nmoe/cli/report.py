"""`nmoe report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs.")],
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write one page of all runs instead, which needs no network and no other file."
        ),
    ] = None,
) -> None:
    """Write each run's report, or one page of all, and print its path.

    \b
    Example:
      nmoe report runs/speedrun/sort_grpo
    Example, several runs on one page:
      nmoe report runs/base runs/wide --html both.html
    """
    if html is not None:
        from nmoe.runs.page import write_page

        typer.echo(write_page(runs, html))
        return
    from nmoe.runs.report import write_report

    for run in runs:
        typer.echo(write_report(run))
