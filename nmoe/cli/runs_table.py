"""`nmoe runs table`."""

from typing import Annotated

import typer


def table(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories of runs, or quoted globs.")],
) -> None:
    """Print a table of results to publish, in Markdown.

    Runs that differ in the seed alone are one row: median, worst and mean with its interval,
    machine and commit.

    \b
    Example:
      nmoe runs table "runs/base-*" "runs/wide-*"
    """
    from nmoe.runs.table import results_table

    typer.echo(results_table(runs), nl=False)
